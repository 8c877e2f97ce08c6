"""Adapters in PEFT's format: adapter_model.safetensors and adapter_config.json. No torch."""

from __future__ import annotations

import re
from typing import Any

from hpcrl.model.hf.families import family_of
from hpcrl.model.lora import PROJECTIONS, Lora, is_adapter
from hpcrl.model.params import Box, Shard, shards
from hpcrl.model.shape import ModelShape

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
PEFT_PREFIX = "base_model.model."  # PEFT's wrappers around the model


def peft_shards(shape: ModelShape, lora: Lora) -> list[Shard]:
    """Return PEFT's tensors, whole: `local_name` is PEFT's, `name` and boxes are Megatron's.

    Names are those of the modules of transformers 4. On transformers 5, where experts are not modules, PEFT (0.21)
    converts experts' adapters into its own for stacked weights: of both gate and up or of neither, and it then drops
    those of dense layers.
    """
    found = []
    for shard in shards(shape, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, lora=lora):
        if is_adapter(shard.name):
            rows, cols = shard.global_shape
            box = Box((0, rows), (0, cols), 0, 0)
            found.append(shard._replace(local_name=_peft_name(shape, shard.name), boxes=(box,), tp_replicated=True))
    return found


def adapter_config(shape: ModelShape, lora: Lora, base: str | None) -> dict[str, Any]:
    """Return adapter_config.json. `base`: the directory that the adapters belong to."""
    modules = {shard.local_name.split(".")[-3] for shard in peft_shards(shape, lora)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }


def _peft_name(shape: ModelShape, name: str) -> str:
    """PEFT's name of a parameter, such as decoder.layers.0.self_attention.q_proj.lora_A."""
    parent, projection, factor = name.rsplit(".", 2)
    matrix = next(matrix for matrix, projections in PROJECTIONS.items() if projection in projections)
    pattern = re.sub(r"local_experts\.\d+", "local_experts.#", re.sub(r"layers\.\d+", "layers.*", parent))
    peft_name = family_of(shape).names[f"{pattern}.{matrix}.weight"][PROJECTIONS[matrix].index(projection)]
    for sign, number in zip(("*", "#"), re.findall(r"\.(\d+)", parent), strict=False):
        peft_name = peft_name.replace(sign, number)
    return f"{PEFT_PREFIX}{peft_name.removesuffix('.weight')}.{factor}.weight"
