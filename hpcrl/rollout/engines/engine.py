"""What an engine declares of models, weights and memory, beside what `hpcrl.config.engines` has. No torch.

    @register_engine("mine", params=MyParameters)
    class Mine(Engine):
        def make(self, groups, shape, config, *, ranks_on_node):
            return MyEngine(..., self.parameters(config))

`MyEngine` is a `hpcrl.rollout.protocol.RolloutEngine`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

from hpcrl.config.engines import EngineSpec
from hpcrl.config.plugins import parameters

if TYPE_CHECKING:
    from hpcrl.config.schema import Config
    from hpcrl.engine.refit.pieces import EngineShards
    from hpcrl.model.params import Shard
    from hpcrl.model.shape import ModelShape
    from hpcrl.rollout.engines.cache_layout import PlannedCache
    from hpcrl.rollout.protocol import RolloutEngine
    from hpcrl.runtime.groups import RoleGroups


class Engine(EngineSpec):
    """has_own_layout: its weights are as `shards` says; otherwise they are megatron's, by tensor parallelism."""

    has_own_layout: ClassVar[bool] = False

    def parameters(self, config: Config) -> Any:
        """Return the instance of `params` with the values of the config. Raises ConfigError."""
        return parameters(config, "rollout", self.name)

    def shards(self, shape: ModelShape, rank: int, ranks: int) -> list[Shard]:
        """Return the weights of one of the ranks of a replica, as rectangles of megatron's tensors. `local_name` is the
        engine's name, `name` and boxes are megatron's. Raises InputError for a model whose layout is not known."""
        raise NotImplementedError(f"{type(self).__name__} has no shards()")

    @property
    def layout(self) -> EngineShards | None:
        """The layout of its weights, for `Resharding`; None: megatron's."""
        return self.shards if self.has_own_layout else None

    def cache_bytes(self, cache: PlannedCache, capacity: int | None, taken: int, weights: int) -> int:
        """Return the bytes of a rank's KV cache, for `hpcrl plan`; at least one sequence fits.

        capacity: bytes of the device, of which `taken` have other uses when the engine is built; None: any. weights:
        bytes of the engine's own weights.
        """
        return cache.nbytes(capacity, taken)

    def make(self, groups: RoleGroups, shape: ModelShape, config: Config, *, ranks_on_node: int) -> RolloutEngine:
        """Make the engine of this rank. Collective over the ranks of a replica. Training should have allocated its
        memory before, because the KV cache takes a share of the free memory."""
        raise NotImplementedError(f"{type(self).__name__} has no make()")


def engine_of(config: Config) -> Engine:
    """Return the engine that a config names. Raises UnknownName."""
    return cast(Engine, config.engine)
