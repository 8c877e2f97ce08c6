"""Adapters as PEFT keeps them in a folder: adapter_model.safetensors and adapter_config.json. No torch.

Names are those of the modules of transformers 4. On transformers 5, where experts are no modules, PEFT (0.21) turns
experts' adapters into its own for stacked weights: of gate and up together or neither, and it then drops those of dense
layers beside.
"""

from __future__ import annotations

import re
from typing import Any

from hpcrl.model.hf.families import family_of
from hpcrl.model.lora import PROJECTIONS, Lora, is_adapter
from hpcrl.model.params import Box, Shard, shards
from hpcrl.model.shape import ModelShape

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."  # PEFT's wrappers around the model


def peft_shards(shape: ModelShape, lora: Lora) -> list[Shard]:
    """PEFT's tensors, whole: `local_name` is PEFT's, the others are ours."""
    found = []
    for ours in shards(shape, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, lora=lora):
        if is_adapter(ours.name):
            rows, cols = ours.global_shape
            box = Box((0, rows), (0, cols), 0, 0)
            found.append(ours._replace(local_name=_peft_name(shape, ours.name), boxes=(box,), tp_replicated=True))
    return found


def adapter_config(shape: ModelShape, lora: Lora, base: str | None) -> dict[str, Any]:
    """`base`: the directory that the adapters belong to."""
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
    """PEFT's of ours, such as decoder.layers.0.self_attention.q_proj.lora_A."""
    parent, projection, factor = name.rsplit(".", 2)
    matrix = next(matrix for matrix, projections in PROJECTIONS.items() if projection in projections)
    pattern = re.sub(r"local_experts\.\d+", "local_experts.#", re.sub(r"layers\.\d+", "layers.*", parent))
    theirs = family_of(shape).names[f"{pattern}.{matrix}.weight"][PROJECTIONS[matrix].index(projection)]
    for sign, number in zip(("*", "#"), re.findall(r"\.(\d+)", parent), strict=False):
        theirs = theirs.replace(sign, number)
    return f"{PREFIX}{theirs.removesuffix('.weight')}.{factor}.weight"
