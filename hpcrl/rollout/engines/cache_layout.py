"""The layout of an engine's cache: what each layer caches, blocks of tokens, and bytes. No torch, no numpy.

The native engine has this layout. `hpcrl plan` uses it for engines that do not declare their bytes, too.

Layers that attend to all tokens cache keys and values in blocks, which grow with a sequence. A layer with a window
caches its last tokens in a ring, and a recurrent layer a state: both have a fixed size for each running sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hpcrl.model.blocks.block import CachedHeads, CachedState
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from hpcrl.config.schema import EngineConfig

BLOCK_SIZE = 32  # tokens
FP32 = 4


@dataclass(frozen=True)
class CacheLayout:
    """What a rank caches of each layer."""

    layers: tuple[CachedHeads | CachedState | None, ...]

    @classmethod
    def of(cls, shape: ModelShape, tp_size: int, max_model_len: int) -> CacheLayout:
        """max_model_len: tokens of the longest sequence. A window that is as long is none."""
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
        """Return its bytes. capacity: bytes of the device, of which `taken` have other uses when the engine is built;
        None: any."""
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
