"""The engine of a rollout rank, as `rollout:` asks for it."""

from __future__ import annotations

from hpcrl.config.schema import Config
from hpcrl.grid.groups import RoleGroups
from hpcrl.model.shape import ModelShape
from hpcrl.model.sizes import kv_cache_bytes
from hpcrl.rollout.native.engine import NativeEngine
from hpcrl.rollout.protocol import RolloutEngine
from hpcrl.runtime import accelerator, platform
from hpcrl.workers.model_worker import DTYPES


def make_engine(groups: RoleGroups, shape: ModelShape, config: Config, *, ranks_on_node: int) -> RolloutEngine:
    """Collective over the ranks of a replica. What training needs should be allocated already: the KV cache takes a
    share of what is free."""
    rollout, device = config.rollout, platform.device()
    if rollout.engine == "tensorrt_llm":
        from hpcrl.rollout.tensorrt_llm.engine import make_engine as make_tensorrt_llm

        return make_tensorrt_llm(config, shape, groups, device)
    dtype, tp = DTYPES[rollout.dtype or config.model.dtype], groups.layout.tp
    max_model_len = config.data.max_prompt_length + config.data.max_response_length
    if rollout.kv_cache_gib is not None:
        cache = int(rollout.kv_cache_gib * 2**30)
    else:
        cache = kv_cache_bytes(
            shape,
            tp,
            dtype.itemsize,
            max_num_seqs=rollout.max_num_seqs,
            max_model_len=max_model_len,
            free_bytes=accelerator.free_bytes(device, ranks_on_node),
            utilization=rollout.gpu_memory_utilization,
        )
    return NativeEngine(
        shape,
        groups.tp if tp > 1 else None,
        groups.coord.tp,
        tp,
        dtype,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        max_model_len=max_model_len,
        kv_cache_bytes=cache,
        enable_prefix_caching=rollout.enable_prefix_caching,
        enforce_eager=rollout.enforce_eager,
        exact=rollout.exact,
        device=device,
    )
