"""The native generation engine: continuous batching over a KV cache, in torch, with tensor parallelism.

`native_engine` makes that of a role, with the sizes of its config section.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.config.schema import EngineConfig
from hpcrl.model.exact import TensorParallel, check_exact
from hpcrl.model.shape import ModelShape
from hpcrl.model.tower import Division, Pixels, divide, encode_divided
from hpcrl.rollout.engines.engine import BLOCK_SIZE, CacheLayout, blocks_for, max_kv_bytes
from hpcrl.rollout.engines.native.attention import PagedAttention
from hpcrl.rollout.engines.native.decoder import Decoder
from hpcrl.rollout.engines.native.generate_call import RowCall
from hpcrl.rollout.engines.native.kv_cache import KVCache
from hpcrl.rollout.engines.native.paged_decode import PagedCall, PagedDecode
from hpcrl.rollout.engines.native.row_cache import RowCache
from hpcrl.rollout.protocol import EngineOfCalls
from hpcrl.runtime import accelerator, platform
from hpcrl.runtime.groups import RoleGroups

CPU = torch.device("cpu")


class NativeEngine(EngineOfCalls):
    """One rank of a replica; a `RolloutEngine`. Construction is collective over its tensor-parallel ranks.

    `max_num_seqs` sequences run at once, `max_num_batched_tokens` prompt tokens are prefilled in one call, and
    `max_model_len` is the longest prompt plus the longest response. The KV cache takes `kv_cache_bytes` on each rank
    (None: as much as these limits can use) of `cache_dtype` (None: `dtype`); if it is full, sequences wait or are
    preempted.
    """

    def __init__(
        self,
        shape: ModelShape,
        tp_group: dist.ProcessGroup | None,
        tp_rank: int,
        tp_size: int,
        dtype: torch.dtype,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        kv_cache_bytes: int | None = None,
        enable_prefix_caching: bool = True,
        enforce_eager: bool = False,
        exact: bool = False,
        quantization: str | None = None,
        cache_dtype: torch.dtype | None = None,
        device: torch.device = CPU,
    ) -> None:
        if exact:
            check_exact(shape, tp_size, dtype, device)
        tp = TensorParallel(tp_group, tp_rank, tp_size, exact)
        layout, limits = CacheLayout.of(shape, tp_size, max_model_len), (max_num_seqs, max_model_len)
        cached = cache_dtype or dtype
        if kv_cache_bytes is None:
            kv_cache_bytes = layout.most_bytes(cached.itemsize, *limits)
        self._max_encoded_tokens = max_num_batched_tokens
        self._decoder = Decoder(shape, tp, dtype, device, quantization)
        width = blocks_for(max_model_len)
        size = tp.smallest(layout.num_blocks(cached.itemsize, kv_cache_bytes, *limits))
        has_kernels, self._paged = bool(layout.heads) and PagedAttention.fits(layout, BLOCK_SIZE, cached, device), None
        self._cache: KVCache | RowCache
        options: dict[str, Any] = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
            "enable_prefix_caching": enable_prefix_caching,
        }
        if device.type == "cpu" and not has_kernels:
            self._cache = RowCache(layout, size, BLOCK_SIZE, max_num_seqs, width * BLOCK_SIZE, cached)
            self._begin = partial(RowCall, self._decoder, self._cache, **options)
        else:
            self._cache = KVCache(layout, size, BLOCK_SIZE, max_num_seqs, cached, device)
            graphed = device.type == "cuda" and has_kernels and not enforce_eager
            self._paged = PagedDecode(self._decoder, self._cache, max_num_seqs, width, is_graphed=graphed)
            self._begin = partial(PagedCall, self._decoder, self._cache, paged=self._paged, **options)

    def weights(self) -> dict[str, Tensor]:
        return self._decoder.weights

    def adopt(self, name: str, tensor: Tensor) -> None:
        self._decoder.adopt(name, tensor)
        self._clear_graphs()

    def share(self, grids: np.ndarray) -> list[int]:
        """Return the numbers of the pictures that this rank encodes of those with these `grids`, int (n, 3)."""
        return divide(grids, self._decoder.tp.size)[self._decoder.tp.rank]

    @torch.no_grad()
    def encode(
        self, grids: np.ndarray, patches: Callable[[list[int]], list[np.ndarray]], *, divided: bool = True
    ) -> list[Tensor]:
        """Return the vision tower's features of each picture, fp32 (tokens, width) on the CPU. Collective over the
        tensor-parallel ranks, which divide the pictures, if `divided`. At most as many tokens as in a prefill are
        encoded at a time.

        Args:
            grids: int (n, 3), patches in time, height and width.
            patches: from the numbers of this rank's pictures to fp32 (patches, patch width) each.
        """
        decoder = self._decoder
        if decoder.tower is None or decoder.vision is None:
            raise ValueError("the model has no vision tower; only a vision-language model takes pictures")

        def pixels(numbers: list[int]) -> Pixels:
            rows = torch.from_numpy(np.concatenate(patches(numbers)))
            return Pixels(rows, torch.from_numpy(grids[numbers].astype(np.int64)))

        divisions = [Division(decoder.tp.group, is_split=False)] if divided and decoder.tp.group is not None else []
        most = self._max_encoded_tokens * decoder.vision.merge_size**2
        is_frozen = decoder.vision.train == "none"  # then features are kept for later steps
        features = encode_divided(
            decoder.tower, decoder.vision, grids, pixels, divisions, one_by_one=is_frozen, max_patches=most
        )
        return list(features.float().cpu().split([decoder.vision.num_tokens(tuple(grid)) for grid in grids.tolist()]))

    @property
    def is_asleep(self) -> bool:
        return not self._cache.is_allocated

    def sleep(self) -> None:
        self._cache.release()
        self._clear_graphs()

    def wake(self) -> None:
        if self.is_asleep:
            self._cache.allocate()

    def _clear_graphs(self) -> None:
        if self._paged is not None:
            self._paged.clear_graphs()


def native_engine(
    groups: RoleGroups,
    shape: ModelShape,
    cfg: EngineConfig,
    dtype: torch.dtype,
    max_model_len: int,
    *,
    ranks_on_node: int,
    enable_prefix_caching: bool = True,
    exact: bool = False,
    quantization: str | None = None,
    cache_dtype: torch.dtype | None = None,
) -> NativeEngine:
    """A native engine with the sizes of a role's config section.

    Args:
        max_model_len: tokens of prompt and response.
    """
    device, tp = platform.device(), groups.layout.tp
    return NativeEngine(
        shape,
        groups.tp if tp > 1 else None,
        groups.coord.tp,
        tp,
        dtype,
        max_num_seqs=cfg.max_num_seqs,
        max_num_batched_tokens=cfg.max_num_batched_tokens,
        max_model_len=max_model_len,
        kv_cache_bytes=cache_bytes(cfg, shape, tp, cache_dtype or dtype, max_model_len, ranks_on_node),
        enable_prefix_caching=enable_prefix_caching,
        enforce_eager=cfg.enforce_eager,
        exact=exact,
        quantization=quantization,
        cache_dtype=cache_dtype,
        device=device,
    )


def cache_bytes(
    cfg: EngineConfig, shape: ModelShape, tp: int, dtype: torch.dtype, max_model_len: int, ranks_on_node: int
) -> int:
    """Return the bytes of a rank's KV cache: those of the config, or a share of the free memory, at most what the
    sequences can use."""
    if cfg.kv_cache_gib is not None:
        return int(cfg.kv_cache_gib * 2**30)
    share = int(accelerator.free_bytes(platform.device(), ranks_on_node) * cfg.gpu_memory_utilization)
    return min(share, max_kv_bytes(shape, tp, dtype.itemsize, cfg.max_num_seqs, max_model_len))
