"""Transformer Engine's layers in the place of megatron's own, on GPUs.

Nobody has run this yet: no machine with a GPU and Transformer Engine was at hand. What is known of it here is that it
is left out where it cannot be used, and that what cannot work is refused.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch

from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from hpcrl.config.schema import TransformerEngineConfig
    from hpcrl.model.shape import ModelShape

FP8_ROWS = 32  # tokens of a product in 8 bits come in multiples of 16, under the mxfp8 recipe of 32


def is_used(
    cfg: TransformerEngineConfig | None,
    device: torch.device,
    shape: ModelShape,
    *,
    exact: bool,
    has_adapters: bool = False,
) -> bool:
    """Whether the layers of a model on `device` are Transformer Engine's; InputError for settings that cannot work."""
    wanted = None if cfg is None else cfg.enable
    missing = None
    if device.type != "cuda":
        missing = "there is no GPU here"
    elif importlib.util.find_spec("transformer_engine") is None:
        missing = "transformer_engine is not installed"
    elif exact:
        missing = "rollout.exact=true has layers of its own"
    elif shape.mla:
        missing = "latent attention has layers of its own"
    elif has_adapters:
        missing = "model.lora_rank has adapters beside megatron's own layers"
    if wanted and missing:
        raise InputError(f"model.transformer_engine.enable=true, and {missing}; leave it out or set it to null")
    used = missing is None and wanted is not False
    if cfg is not None and cfg.fp8 is not None:
        if not used:
            raise InputError(
                f"model.transformer_engine.fp8={cfg.fp8} needs Transformer Engine, and "
                f"{missing or 'model.transformer_engine.enable is false'}; set fp8 to null"
            )
        if shape.num_experts:
            raise InputError(
                f"model.transformer_engine.fp8={cfg.fp8} with experts is not supported, as their tokens come in any "
                "number; set fp8 to null"
            )
    return used


def config_entries(cfg: TransformerEngineConfig | None) -> dict[str, Any]:
    """For megatron's TransformerConfig."""
    return {"fp8": cfg.fp8, "fp8_recipe": cfg.fp8_recipe} if cfg is not None and cfg.fp8 is not None else {}


def use_transformer_engine(spec: ModuleSpec) -> None:
    """Put its linear layers and norms into a layer of megatron's local spec, in place.

    Not its whole layer: norms stay apart from the products that they come before, so that parameters have the same
    names and shapes as without it, for which checkpoints, loading and refit have one table. Attention stays ours.
    """
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear

    from hpcrl.runtime.megatron_versions import mlp_submodules

    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = TENorm
    attention, mlp = layer.self_attention.submodules, mlp_submodules(spec)[0]
    attention.linear_qkv, attention.linear_proj = TEColumnParallelLinear, TERowParallelLinear
    mlp.linear_fc1, mlp.linear_fc2 = TEColumnParallelLinear, TERowParallelLinear
