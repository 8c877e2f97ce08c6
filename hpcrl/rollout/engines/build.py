"""The rollout engine that a config asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcrl.config.schema import Config, EngineConfig
from hpcrl.model.build import DTYPES
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.native.cache_layout import max_kv_bytes
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.protocol import RolloutEngine
from hpcrl.runtime import accelerator, platform
from hpcrl.runtime.groups import RoleGroups

if TYPE_CHECKING:
    import torch


def make_engine(groups: RoleGroups, shape: ModelShape, config: Config, *, ranks_on_node: int) -> RolloutEngine:
    """Make the engine. Collective over the ranks of a replica. Training should have allocated its memory before,
    because the KV cache takes a share of the free memory."""
    rollout, device = config.rollout, platform.device()
    if rollout.engine == "tensorrt_llm":
        from hpcrl.rollout.engines.tensorrt_llm.engine import make_engine as make_tensorrt_llm

        return make_tensorrt_llm(config, shape, groups, device)
    return native_engine(
        groups,
        shape,
        rollout,
        DTYPES[rollout.dtype or config.model.dtype],
        config.data.max_prompt_length + config.data.max_response_length,
        ranks_on_node=ranks_on_node,
        enable_prefix_caching=rollout.enable_prefix_caching,
        exact=rollout.exact,
    )


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
) -> NativeEngine:
    """A native engine with the sizes of a role's config section. max_model_len: tokens of prompt and response."""
    device, tp = platform.device(), groups.layout.tp
    if cfg.kv_cache_gib is not None:
        cache = int(cfg.kv_cache_gib * 2**30)
    else:
        share = int(accelerator.free_bytes(device, ranks_on_node) * cfg.gpu_memory_utilization)
        cache = min(share, max_kv_bytes(shape, tp, dtype.itemsize, cfg.max_num_seqs, max_model_len))
    return NativeEngine(
        shape,
        groups.tp if tp > 1 else None,
        groups.coord.tp,
        tp,
        dtype,
        max_num_seqs=cfg.max_num_seqs,
        max_num_batched_tokens=cfg.max_num_batched_tokens,
        max_model_len=max_model_len,
        kv_cache_bytes=cache,
        enable_prefix_caching=enable_prefix_caching,
        enforce_eager=cfg.enforce_eager,
        exact=exact,
        device=device,
    )
