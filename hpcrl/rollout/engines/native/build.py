"""A native engine with the sizes of a config section."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcrl.config.schema import EngineConfig
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.cache_layout import max_kv_bytes
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.runtime import accelerator, platform
from hpcrl.runtime.groups import RoleGroups

if TYPE_CHECKING:
    import torch


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
    """A native engine with the sizes of a role's config section. max_model_len: tokens of prompt and response."""
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
