"""Transformer Engine's layers in place of megatron's, on GPUs.

Never run: no machine with a GPU and Transformer Engine was available. Tests show that it is disabled if it cannot be
used, and that unsupported settings raise errors.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from hpcrl.model.blocks.block import unsupported
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from hpcrl.config.schema import TransformerEngineConfig
    from hpcrl.model.shape import ModelShape

FP8_ROWS = 32  # 8-bit products need a multiple of 16 tokens, of 32 under the mxfp8 recipe


def is_used(
    cfg: TransformerEngineConfig | None,
    device: torch.device,
    shape: ModelShape,
    *,
    exact: bool,
    has_adapters: bool = False,
) -> bool:
    """Whether the layers of a model on `device` are Transformer Engine's. Raises InputError for settings that cannot
    work."""
    enable, other = None if cfg is None else cfg.enable, unsupported(shape.layers, "transformer_engine")
    problems = {
        "there is no GPU": device.type != "cuda",
        "transformer_engine is not installed": importlib.util.find_spec("transformer_engine") is None,
        "rollout.exact=true uses other layers": exact,
        f"{other} uses other layers": other is not None,
        "model.lora_rank needs megatron's own layers": has_adapters,
    }
    missing = next((problem for problem, is_found in problems.items() if is_found), None)
    if enable and missing:
        raise InputError(f"model.transformer_engine.enable=true, but {missing}; remove it or set it to null")
    used = missing is None and enable is not False
    if cfg is not None and cfg.fp8 is not None:
        if not used:
            raise InputError(
                f"model.transformer_engine.fp8={cfg.fp8} needs Transformer Engine, but "
                f"{missing or 'model.transformer_engine.enable is false'}; set fp8 to null"
            )
        if block := unsupported(shape.layers, "fp8"):
            raise InputError(f"model.transformer_engine.fp8={cfg.fp8} with {block} is not supported; set fp8 to null")
    return used


def use_transformer_engine(spec: ModuleSpec) -> None:
    """Replace linear layers and norms in a layer of megatron's local spec, in place.

    Norms are not fused into the products after them, so that parameters have the same names and shapes as without
    Transformer Engine, and checkpoints, loading and refit use one table. Attention is not replaced.
    """
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear

    from hpcrl.runtime.megatron_versions import mlp_submodules

    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = TENorm
    attention, mlp = layer.self_attention.submodules, mlp_submodules(spec)[0]
    attention.linear_qkv, attention.linear_proj = TEColumnParallelLinear, TERowParallelLinear
    mlp.linear_fc1, mlp.linear_fc2 = TEColumnParallelLinear, TERowParallelLinear
