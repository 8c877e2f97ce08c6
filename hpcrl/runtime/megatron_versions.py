"""Differences between the supported versions of megatron-core, 0.16 and 0.19.

Interfaces that both have, or that only have more arguments in the later version, are used directly by other modules.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron.core.optimizer import distrib_optimizer, optimizer
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.mlp import MLPSubmodules
    from torch import Tensor

# Keys that identify a parameter group of a checkpoint. 0.19 adds the learning rates, so that a run could not be resumed
# with other ones.
_GROUP_KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")

# Warnings of 0.19 on each model: logger -> beginning of the message.
_EXPECTED = {
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not provided",
}


def install() -> None:
    """Patch megatron-core so that all versions behave alike. `platform.install` calls it once."""
    # 0.16 reads the name even without Transformer Engine, whose product of a router's fp32 numbers is TF32.
    moe_utils.te_general_gemm = None
    optimizer.param_group_identifier_keys = distrib_optimizer.param_group_identifier_keys = _GROUP_KEYS
    for name, message in _EXPECTED.items():
        logging.getLogger(name).addFilter(functools.partial(_is_unexpected, message))


def _is_unexpected(expected: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(expected)


def submodules_of(description: Any) -> Any:
    """The submodules of a description, to be changed in place.

    The description is a `ModuleSpec`, or the partial that 0.19 has for an MLP, a mixture and its experts.
    """
    return description.submodules if isinstance(description, ModuleSpec) else description.keywords["submodules"]


def mlp_submodules(layer: ModuleSpec) -> list[MLPSubmodules]:
    """Submodules of a layer's MLP, or of its routed and its shared experts."""
    inside = submodules_of(layer.submodules.mlp)
    if hasattr(inside, "experts"):
        return [submodules_of(inside.experts), submodules_of(inside.shared_experts)]
    return [inside]


def use_mixture(
    layer: ModuleSpec, mixture: type, router: Callable[..., Any], groups: ProcessGroupCollection, **options: Any
) -> None:
    """Replace a layer's mixture of experts and router.

    Args:
        options: options of `mixture`.
    """
    description = layer.submodules.mlp
    submodules_of(description).router = router
    if isinstance(description, ModuleSpec):
        description.module = mixture
        description.params = {"pg_collection": groups, **options}  # megatron passes groups to its own class only
    else:
        layer.submodules.mlp = functools.partial(mixture, submodules=submodules_of(description), **options)


def grads_for_norm(optimizer: MegatronOptimizer) -> list[Tensor]:
    """The gradients that this rank adds to the gradient norm.

    Without shared parameters, and without those that another tensor-parallel rank has as well.
    """
    method: Callable[[], list[Tensor]] | None = getattr(optimizer, "get_grads_for_grad_norm", None)  # of 0.19
    return (method or optimizer.get_main_grads_for_grad_norm)()
