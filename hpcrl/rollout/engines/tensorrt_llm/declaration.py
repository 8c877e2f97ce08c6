"""What TensorRT-LLM declares, and its collective import. No torch.

It splits MPI_COMM_WORLD when it is imported, by a constant that only Open MPI has: every rank must import it at the
same point, and other MPI libraries hang or abort.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from hpcrl.config.engines import register_engine
from hpcrl.config.yaml_core import ConfigError
from hpcrl.model.blocks.block import CachedHeads
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.engine import BLOCK_SIZE, Engine, blocks_for
from hpcrl.rollout.engines.fused_shards import check_layout, fused_shards
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.launcher import library_name
from hpcrl.runtime.mpi import barrier, run_collectively

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcrl.config.schema import Config
    from hpcrl.model.params import Shard
    from hpcrl.rollout.engines.engine import PlannedCache
    from hpcrl.rollout.protocol import RolloutEngine
    from hpcrl.runtime.groups import RoleGroups

PACKAGE = "tensorrt_llm"


def unsupported_mpi(library: str, thread_multiple: bool) -> str | None:
    """Error text if TensorRT-LLM cannot use this MPI, otherwise None.

    Args:
        library: the string that MPI_Get_library_version returns.
    """
    if not library.startswith("Open MPI"):
        return (
            f"TensorRT-LLM needs Open MPI, and mpi4py found {library_name(library)}: run in TensorRT-LLM's container "
            "with its own mpi4py and `srun --mpi=pmix`, or use rollout.engine=native"
        )
    if not thread_multiple:
        return (
            "TensorRT-LLM calls MPI from a thread of its own, and this Open MPI gives less than MPI_THREAD_MULTIPLE; "
            "use one that is built with it, or rollout.engine=native"
        )
    return None


def missing_package() -> str | None:
    """Error text if the package is not installed, otherwise None. Does not import it."""
    if importlib.util.find_spec(PACKAGE) is None:
        return (
            "tensorrt-llm is not installed: run in TensorRT-LLM's container (its release 1.2.1), or use "
            "rollout.engine=native"
        )
    return None


def import_on_all_ranks(comm: MPI.Intracomm) -> None:
    """Import tensorrt_llm on every rank of MPI's world, which `comm` must span. Collective.

    Raises InputError on all ranks if MPI is unsupported or the package is missing on any of them. If the import itself
    fails, the other ranks may spin in it: then only this rank raises InputError (not `everywhere`), and must call
    `world.abort`.
    """
    from mpi4py import MPI

    def check() -> None:
        why = unsupported_mpi(MPI.Get_library_version(), MPI.Query_thread() == MPI.THREAD_MULTIPLE) or missing_package()
        if why is not None:
            raise InputError(why)

    run_collectively(comm, check)
    barrier(comm)  # the import spins until all ranks have begun it
    load()


def load() -> None:
    try:
        importlib.import_module(PACKAGE)
    except Exception as error:  # such as a missing library: a fault of the user's installation
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(
            f"tensorrt_llm cannot be imported: {why}; correct its installation, or use rollout.engine=native"
        ) from error


TOKENS_PER_BLOCK = 32  # of its paged KV cache


def kv_bytes_per_token(shape: ModelShape, tp_size: int, itemsize: int) -> int:
    """Return the bytes of keys and values of a token on one rank in TensorRT-LLM, where a head cannot be split."""
    found = 0
    for layer in shape.layers:
        if isinstance(cached := layer.attention.cached(1), CachedHeads):
            found += 2 * -(-cached.groups // tp_size) * cached.key_dim * itemsize
    return found


TOP_K = 1024  # its sampler takes larger ones for this, and only warns


def check_model(shape: ModelShape, tp: int) -> None:
    """Raise InputError if the engine does not support the model, or if its layout of it is unknown."""
    check_layout(shape, tp, "tensorrt_llm")
    if shape.softmax_size < shape.vocab_size:
        raise InputError(
            f"rollout.engine=tensorrt_llm draws from all {shape.vocab_size} ids of the model, and the tokenizer has "
            f"{shape.softmax_size}; use engine=native, or model.softmax_vocab=config, with which all ids are trained on"
        )


@register_engine("tensorrt_llm")
class TensorRTLLM(Engine):
    verl_name = "trtllm"
    has_own_layout = True
    expandable_segments = False  # its sleep mode uses memory pools, which torch 2.9 cannot make from such segments

    def shards(self, shape: ModelShape, rank: int, ranks: int) -> list[Shard]:
        """Names and shapes are those of the unquantized parameters of a Llama-like model in version 1.2; they have not
        been compared on a GPU yet. The vocabulary is padded to a multiple of the ranks only; rows of padding stay 0."""
        check_model(shape, ranks)
        return list(fused_shards(shape, rank, ranks, -(-shape.vocab_size // ranks)))

    def check(self, config: Config, tp: int) -> None:
        trtllm = config.rollout.trtllm
        if trtllm.model_dir is None and config.model.path is None:
            raise ConfigError(
                "rollout.engine=tensorrt_llm reads config.json of a Hugging Face directory, and "
                "rollout.trtllm.model_dir is null; name one there"
            )
        if trtllm.design == "single_process" and tp > 1:
            raise ConfigError(
                f"rollout.trtllm.design=single_process makes replicas of one rank, and placement.rollout.tp={tp}; "
                "use tp: 1, or design: tp_group"
            )
        dtype = config.rollout.dtype or config.model.dtype
        if dtype != "bfloat16":
            raise ConfigError(
                f"rollout.engine=tensorrt_llm is run in bfloat16, and the engine's dtype would be {dtype}; "
                "set rollout.dtype=bfloat16, or use rollout.engine=native"
            )
        if config.rollout.max_num_batched_tokens < config.rollout.max_num_seqs:
            raise ConfigError(
                f"rollout.max_num_batched_tokens={config.rollout.max_num_batched_tokens} is less than "
                f"rollout.max_num_seqs={config.rollout.max_num_seqs}, and TensorRT-LLM decodes all of them in one "
                "call; raise it, or lower max_num_seqs"
            )
        ways = {"rollout": config.rollout.top_k}
        ways |= {f"rollout.val_kwargs (n={way.n})": way.top_k for way in config.rollout.val_kwargs}
        for section, top_k in ways.items():
            if top_k > TOP_K:
                raise ConfigError(
                    f"{section}: top_k={top_k} is more than TensorRT-LLM's sampler keeps; use {TOP_K} or less, or -1"
                )

    def start(self, comm: MPI.Intracomm) -> None:
        import_on_all_ranks(comm)

    def cache_bytes(self, cache: PlannedCache, capacity: int | None, taken: int, weights: int) -> int:
        cfg, per_token = cache.cfg, kv_bytes_per_token(cache.shape, cache.tp, cache.itemsize)
        least = blocks_for(cache.longest) * BLOCK_SIZE * per_token
        most = cfg.max_num_seqs * least
        if cfg.kv_cache_gib is not None:
            return min(int(cfg.kv_cache_gib * 2**30), most)
        if capacity is None:
            return most
        return max(least, min(most, int(max(0, capacity - taken - weights) * cfg.gpu_memory_utilization)))

    def make(self, groups: RoleGroups, shape: ModelShape, config: Config, *, ranks_on_node: int) -> RolloutEngine:
        from hpcrl.rollout.engines.tensorrt_llm.engine import make_engine
        from hpcrl.runtime import platform

        return make_engine(config, shape, groups, platform.device())
