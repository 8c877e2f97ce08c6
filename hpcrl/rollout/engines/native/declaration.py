"""What the native engine declares. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcrl.config.engines import register_engine
from hpcrl.rollout.engines.engine import Engine

if TYPE_CHECKING:
    from hpcrl.config.schema import Config
    from hpcrl.model.shape import ModelShape
    from hpcrl.rollout.protocol import RolloutEngine
    from hpcrl.runtime.groups import RoleGroups


@register_engine("native")
class Native(Engine):
    supports = frozenset(("pictures", "routed_experts", "exact", "shared_weights", "evaluations", "fp8"))

    def make(self, groups: RoleGroups, shape: ModelShape, config: Config, *, ranks_on_node: int) -> RolloutEngine:
        from hpcrl.kernels.dispatch import FP8
        from hpcrl.model.build import DTYPES
        from hpcrl.rollout.engines.native.engine import native_engine

        rollout = config.rollout
        return native_engine(
            groups,
            shape,
            rollout,
            DTYPES[rollout.dtype or config.model.dtype],
            config.data.max_prompt_length + config.data.max_response_length,
            ranks_on_node=ranks_on_node,
            enable_prefix_caching=rollout.enable_prefix_caching,
            exact=rollout.exact,
            quantization=rollout.quantization,
            cache_dtype=FP8 if rollout.kv_cache_dtype == "fp8" else None,
        )
