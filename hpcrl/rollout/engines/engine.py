"""What an engine declares of models, weights and memory, beside what `hpcrl.config.engines` has. No torch.

    @register_engine("mine", params=MyParameters)
    class Mine(Engine):
        def make(self, groups, shape, config, *, ranks_on_node):
            return MyEngine(..., self.parameters(config))

`MyEngine` is a `hpcrl.rollout.protocol.RolloutEngine`. `CacheLayout` says what a rank caches of each layer, in
bytes and blocks, for engines and for `hpcrl plan`. No numpy either.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, cast

from hpcrl.config.engines import EngineSpec
from hpcrl.config.plugins import parameters
from hpcrl.model.blocks.block import CachedHeads, CachedState
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from hpcrl.config.schema import Config, EngineConfig
    from hpcrl.engine.refit.pieces import EngineShards
    from hpcrl.model.params import Shard
    from hpcrl.rollout.protocol import RolloutEngine
    from hpcrl.runtime.groups import RoleGroups

BLOCK_SIZE = 32  # tokens
FP32 = 4


@dataclass(frozen=True)
class CacheLayout:
    """What a rank caches of each layer."""

    layers: tuple[CachedHeads | CachedState | None, ...]

    @classmethod
    def of(cls, shape: ModelShape, tp_size: int, max_model_len: int) -> CacheLayout:
        """Return the layout of a rank's cache.

        Args:
            max_model_len: tokens of the longest sequence. A window that is as long counts as none.
        """
        cached = [layer.attention.cached(tp_size) for layer in shape.layers]
        return cls(
            tuple(
                it._replace(window=None)
                if isinstance(it, CachedHeads) and it.window is not None and it.window >= max_model_len
                else it
                for it in cached
            )
        )

    @cached_property
    def heads(self) -> dict[CachedHeads, tuple[int, ...]]:
        """The layers by what they cache of tokens."""
        found: dict[CachedHeads, list[int]] = {}
        for number, cached in enumerate(self.layers):
            if isinstance(cached, CachedHeads):
                found.setdefault(cached, []).append(number)
        return {cached: tuple(numbers) for cached, numbers in found.items()}

    @cached_property
    def states(self) -> dict[int, CachedState]:
        return {number: it for number, it in enumerate(self.layers) if isinstance(it, CachedState)}

    @cached_property
    def has_fixed(self) -> bool:
        """Whether some layer does not keep all tokens."""
        return bool(self.states) or any(heads.window is not None for heads in self.heads)

    def block_bytes(self, itemsize: int) -> int:
        """Return the bytes of `BLOCK_SIZE` tokens in all layers that keep all tokens."""
        widths = (heads.width * len(numbers) for heads, numbers in self.heads.items() if heads.window is None)
        return sum(widths) * BLOCK_SIZE * itemsize

    def sequence_bytes(self, itemsize: int) -> int:
        """Return the bytes of a running sequence in the other layers."""
        rings = (heads.width * len(numbers) * (heads.window or 0) for heads, numbers in self.heads.items())
        return sum(rings) * itemsize + sum(state.numel for state in self.states.values()) * FP32

    def most_bytes(self, itemsize: int, max_num_seqs: int, max_model_len: int) -> int:
        """Return the bytes if `max_num_seqs` sequences have all grown to `max_model_len` tokens."""
        blocks = blocks_for(max_model_len) * self.block_bytes(itemsize)
        return max_num_seqs * (blocks + self.sequence_bytes(itemsize))

    def num_blocks(self, itemsize: int, cache_bytes: int, max_num_seqs: int, max_model_len: int) -> int:
        """Return how many blocks fit beside the fixed parts of all running sequences. Raises InputError if a single
        sequence of `max_model_len` tokens does not fit."""
        each, needed = self.block_bytes(itemsize), blocks_for(max_model_len)
        fixed = max_num_seqs * self.sequence_bytes(itemsize)
        if not each and fixed <= cache_bytes:
            return max_num_seqs * needed
        count = max(cache_bytes - fixed, 0) // max(each, 1)
        if count < needed:
            beside = f" beside {fixed:,} bytes for the windows and states of {max_num_seqs} sequences" if fixed else ""
            raise InputError(
                f"the KV cache of {cache_bytes:,} bytes holds {count * BLOCK_SIZE} tokens{beside}, but one sequence of "
                f"max_model_len={max_model_len} needs {needed * each:,} bytes; raise kv_cache_gib or "
                "gpu_memory_utilization (of rollout, or of reward.judge for a judge), or shorten prompts and responses"
            )
        return count


def max_kv_bytes(shape: ModelShape, tp_size: int, itemsize: int, max_num_seqs: int, max_model_len: int) -> int:
    """Return the bytes of a rank's KV cache if `max_num_seqs` sequences have all grown to `max_model_len` tokens."""
    return CacheLayout.of(shape, tp_size, max_model_len).most_bytes(itemsize, max_num_seqs, max_model_len)


@dataclass(frozen=True)
class PlannedCache:
    """The KV cache of a rank as `hpcrl plan` counts it. longest: tokens of a sequence, of which at least one fits."""

    cfg: EngineConfig
    shape: ModelShape
    tp: int
    itemsize: int
    longest: int

    def nbytes(self, capacity: int | None, taken: int) -> int:
        """Return its bytes.

        Args:
            capacity: bytes of the device, of which `taken` have other uses when the engine is built; None: any.
        """
        cfg, itemsize, longest = self.cfg, self.itemsize, self.longest
        if cfg.kv_cache_gib is not None:
            return int(cfg.kv_cache_gib * 2**30)
        layout = CacheLayout.of(self.shape, self.tp, longest)
        least = cfg.max_num_seqs * layout.sequence_bytes(itemsize) + blocks_for(longest) * layout.block_bytes(itemsize)
        most = layout.most_bytes(itemsize, cfg.max_num_seqs, longest)
        if capacity is None:
            return most
        return max(least, min(most, int(max(0, capacity - taken) * cfg.gpu_memory_utilization)))


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


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

        Args:
            capacity: bytes of the device, of which `taken` have other uses when the engine is built; None: any.
            weights: bytes of the engine's own weights.
        """
        return cache.nbytes(capacity, taken)

    def make(self, groups: RoleGroups, shape: ModelShape, config: Config, *, ranks_on_node: int) -> RolloutEngine:
        """Make the engine of this rank. Collective over the ranks of a replica. Training should have allocated its
        memory before, because the KV cache takes a share of the free memory."""
        raise NotImplementedError(f"{type(self).__name__} has no make()")


def engine_of(config: Config) -> Engine:
    """Return the engine that a config names. Raises UnknownName."""
    return cast(Engine, config.engine)
