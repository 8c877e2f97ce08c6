"""Exports of a model: the files of a Hugging Face directory, and adapters in PEFT's format. No torch before tensors are
copied."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hpcrl.model.families.config_json import CONFIG, hf_config
from hpcrl.model.families.family import LANGUAGE_MODEL
from hpcrl.model.hf_files import INDEX, MAX_BYTES, SINGLE, Safetensors, hf_names_of, hf_shards, stack_of
from hpcrl.model.params import Shard, shards
from hpcrl.model.shape import Lora, ModelShape, is_adapter
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox.foreign_files import open_file, read_json

OTHERS = "model-others-"  # prefix of files of tensors that are not the model's
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
)
CHAT_TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"


class HfFile(NamedTuple):
    """writer: the writing rank's place among the writers. shards: see `hf_shards`; all of a stacked tensor, or none."""

    name: str
    writer: int
    shards: list[Shard]


def plan_files(shape: ModelShape, itemsize: int, num_writers: int) -> list[HfFile]:
    """Divide the tensors, in order, into files of about equal size, with at least one file per writer if there are
    enough tensors."""
    tensors: dict[str, list[Shard]] = {}
    for shard in hf_shards(shape):
        tensors.setdefault(stack_of(shard.local_name).name, []).append(shard)
    sizes = [sum(math.prod(shard.local_shape) for shard in parts) * itemsize for parts in tensors.values()]
    limit = min(MAX_BYTES, -(-sum(sizes) // num_writers))
    groups: list[list[Shard]] = []
    filled = limit
    for parts, size in zip(tensors.values(), sizes, strict=True):
        if filled + size > limit and filled > 0:
            groups.append([])
            filled = 0
        groups[-1] += parts
        filled += size
    count = len(groups)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    return [
        HfFile(name, number % num_writers, group)
        for number, (name, group) in enumerate(zip(names if count > 1 else [SINGLE], groups, strict=True))
    ]


class TokenizerFiles(NamedTuple):
    """The directory whose tokenizer an export copies. token_ids: keys that config.json and generation_config.json get,
    such as `eos_token_id`. chat_template: replaces the tokenizer's own."""

    folder: Path
    token_ids: Mapping[str, int | list[int]] = {}
    chat_template: str | None = None


def write_beside(
    folder: Path,
    files: list[HfFile],
    shape: ModelShape,
    itemsize: int,
    dtype: str,
    like: Path | None,
    tokenizer: TokenizerFiles | None,
) -> None:
    """Write index, config.json, generation_config.json and the tokenizer's files. Raises OSError.

    Args:
        like: a directory of the same model, whose config.json and generation_config.json are kept except for dtype and
            token ids, and from which tensors are copied that the model does not have.
    """
    weight_map = {stack_of(shard.local_name).name: file.name for file in files for shard in file.shards}
    total = sum(math.prod(shard.local_shape) * itemsize for file in files for shard in file.shards)
    copied = {} if like is None else _copy_others(folder, shape, like)
    if copied and len(files) == 1:  # readers prefer the single file to an index
        first = f"{OTHERS}00000.safetensors"
        (folder / SINGLE).rename(folder / first)
        weight_map = dict.fromkeys(weight_map, first)
    if copied or len(files) > 1:
        weight_map |= {name: file for name, (file, _) in copied.items()}
        total += sum(nbytes for _, nbytes in copied.values())
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    config: dict[str, Any] = hf_config(shape)
    if like is not None:
        config = read_json(like / CONFIG, like)
    if config.get("num_nextn_predict_layers") and not copied:
        config["num_nextn_predict_layers"] = 0  # their weights are not in the files
    config.pop("quantization_config", None)  # the weights that are written are not quantised
    for key in ("dtype", "torch_dtype"):  # the newer and the older name
        config[key] = dtype
    generation: dict[str, Any] = {}
    if like is not None and (like / GENERATION).is_file():
        generation = read_json(like / GENERATION, like)
    if tokenizer is not None:
        config |= tokenizer.token_ids
        generation |= tokenizer.token_ids
        for name in TOKENIZER:
            if (tokenizer.folder / name).is_file():
                with open_file(tokenizer.folder / name, tokenizer.folder) as source:
                    (folder / name).write_bytes(source.read())
        if tokenizer.chat_template is not None:
            (folder / CHAT_TEMPLATE).write_text(tokenizer.chat_template, encoding="utf-8")
    _write_json(folder / CONFIG, config)
    _write_json(folder / GENERATION, generation)


def _copy_others(folder: Path, shape: ModelShape, like: Path) -> dict[str, tuple[str, int]]:
    """Copy the tensors that are not the model's from `like`. Return each one's file and bytes."""
    if not any((like / name).is_file() for name in (INDEX, SINGLE)):
        return {}
    from safetensors.torch import save_file

    places = dict[str, tuple[str, int]]()
    try:
        for number, part in enumerate(Safetensors(like).others(shape), 1):
            file = f"{OTHERS}{number:05d}.safetensors"
            save_file(part, folder / file, metadata={"format": "pt"})
            places |= {name: (file, tensor.nbytes) for name, tensor in part.items()}
    except InputError as error:  # a directory that has changed since the start
        raise OSError(str(error)) from error
    return places


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
PEFT_PREFIX = "base_model.model."  # PEFT's wrappers around the model


def peft_shards(shape: ModelShape, lora: Lora) -> list[Shard]:
    """Return PEFT's tensors, whole: `local_name` is PEFT's, `name` and boxes are Megatron's.

    Names are those of the modules of transformers 4. On transformers 5, where experts are not modules, PEFT (0.21)
    converts experts' adapters into its own for stacked weights: of both gate and up or of neither, and it then drops
    those of dense layers.
    """
    adapters = list[Shard]()
    of_matrix: dict[str, str] = {}
    for shard in shards(shape, lora=lora):
        if is_adapter(shard.name):  # it follows its matrix
            projection, factor = shard.name.split(".")[-2:]
            peft_name = _peft_name(shape, of_matrix[projection], factor)
            adapters.append(shard._replace(local_name=peft_name, tp_replicated=True))
        elif shard.projections and len(shard.global_shape) == 2:
            of_matrix = dict(zip((it.name for it in shard.projections), hf_names_of(shape, shard.name), strict=False))
    return adapters


def adapter_config(shape: ModelShape, lora: Lora, base: str | None) -> dict[str, Any]:
    """Return adapter_config.json.

    Args:
        base: the directory that the adapters belong to.
    """
    modules = sorted({shard.local_name.split(".")[-3] for shard in peft_shards(shape, lora)})
    # A tower may have modules of the same names, and PEFT would give them adapters.
    within = rf"{re.escape(LANGUAGE_MODEL)}.*\.(?:{'|'.join(modules)})"
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": modules if shape.vision is None else within,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }


def _peft_name(shape: ModelShape, hf_name: str, factor: str) -> str:
    """PEFT's name of the factor of a tensor."""
    if shape.vision is not None:  # as the modules are named; in the files of Qwen2.5-VL "model." is the language model
        hf_name = f"{LANGUAGE_MODEL}{hf_name.removeprefix(LANGUAGE_MODEL).removeprefix('model.')}"
    hf_name = re.sub(r"^backbone\.", "model.", hf_name)  # so transformers renames Nemotron-H's
    return f"{PEFT_PREFIX}{hf_name.removesuffix('.weight')}.{factor}.weight"
