"""Rollout engines by name, as `rollout.engine` names them: what an engine declares without a model. No torch.

An engine is a folder of hpcrl/rollout/engines with a module `declaration`, or a file of run.plugins; see
`hpcrl.rollout.engines.engine`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import hpcrl
from hpcrl.algorithms.parameters import NoParameters, Registry, UnknownName
from hpcrl.runtime.user_code import import_named

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcrl.config.schema import Config

# pictures: of prompts and tools. routed_experts: completions have the experts of tokens. exact: `rollout.exact`.
# shared_weights: it may use the actor's own tensors. evaluations: `hpcrl sft` may sample with it. fp8:
# `rollout.quantization`, by weights that are `hpcrl.kernels.fp8_matrix.Fp8Matrix`.
Capability = Literal["pictures", "routed_experts", "exact", "shared_weights", "evaluations", "fp8"]


class EngineSpec:
    """What an engine declares. What it does not list in `supports` is an error, raised before anything is built."""

    name: ClassVar[str]
    params: ClassVar[type]  # its parameter dataclass
    verl_name: ClassVar[str] = ""  # in verl's rollout.name, if `hpcrl from-verl` keeps the engine
    supports: ClassVar[frozenset[Capability]] = frozenset()
    expandable_segments: ClassVar[bool] = True  # whether CUDA's allocator may use them

    def check(self, config: Config, tp: int) -> None:
        """Raise ConfigError or InputError for settings that do not work with the engine and tensor parallelism `tp`."""

    def start(self, comm: MPI.Intracomm) -> None:
        """Import what has to be imported before torch.distributed starts. Collective over MPI's world."""


def _built_in() -> list[str]:
    folder = Path(hpcrl.__file__).parent / "rollout" / "engines"
    return [f"hpcrl.rollout.engines.{it.name}.declaration" for it in pkgutil.iter_modules([str(folder)]) if it.ispkg]


ENGINES: Registry[EngineSpec] = Registry("rollout engine", *_built_in())
Class = TypeVar("Class", bound="type[EngineSpec]")


def register_engine(name: str, params: type = NoParameters) -> Callable[[Class], Class]:
    """Make `rollout.engine=<name>` use the decorated class, of which one instance is made.

    Args:
        params: a frozen dataclass (see `hpcrl.algorithms.parameters`), whose keys are `rollout.<name>.<field>`.
    """

    def register(engine: Class) -> Class:
        engine.name, engine.params = name, params
        ENGINES.add(name, engine())
        return engine

    return register


def engine_spec(config: Config) -> EngineSpec:
    """Return the engine that a config names. Loads run.plugins if it is not built in. Raises UnknownName, and
    InputError for a plugin that cannot be loaded."""
    if config.rollout.engine not in ENGINES.entries():
        for path in config.run.plugins:
            import_named("run.plugins", path)
    try:
        return ENGINES.get(config.rollout.engine)
    except UnknownName as error:
        raise UnknownName(f"rollout.engine: {error}") from None
