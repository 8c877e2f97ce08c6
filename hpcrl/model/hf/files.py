"""A Hugging Face directory as it is written: which file holds which tensors, and what stands beside them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hpcrl.model.hf.config_json import CONFIG
from hpcrl.model.hf.families import hf_config
from hpcrl.model.hf.spans import hf_shards
from hpcrl.model.params import Shard
from hpcrl.model.shape import ModelShape

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_BYTES = 5 * 10**9  # of a file, unless one tensor is larger; what save_pretrained() has done for years
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
)


class HfFile(NamedTuple):
    """writer: the place of the rank that writes it among the writers. shards: see `spans.hf_shards`."""

    name: str
    writer: int
    shards: list[Shard]


def plan_files(shape: ModelShape, itemsize: int, num_writers: int) -> list[HfFile]:
    """Successive tensors in files of about equal size, at least one for each writer as far as there are tensors."""
    tensors = hf_shards(shape)
    sizes = [math.prod(shard.local_shape) * itemsize for shard in tensors]
    limit = min(MAX_BYTES, -(-sum(sizes) // num_writers))
    groups: list[list[Shard]] = []
    used = limit
    for shard, size in zip(tensors, sizes, strict=True):
        if used + size > limit and used > 0:
            groups.append([])
            used = 0
        groups[-1].append(shard)
        used += size
    count = len(groups)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    return [
        HfFile(name, number % num_writers, group)
        for number, (name, group) in enumerate(zip(names if count > 1 else [SINGLE], groups, strict=True))
    ]


def write_beside(
    folder: Path,
    files: list[HfFile],
    shape: ModelShape,
    itemsize: int,
    dtype: str,
    like: Path | None,
    tokenizer: Path | None,
) -> None:
    """Index, config.json and the tokenizer's files. like: a directory of the same model, whose config.json is kept but
    for the dtype. Raises OSError."""
    if len(files) > 1:
        total = sum(math.prod(shard.local_shape) * itemsize for file in files for shard in file.shards)
        weight_map = {shard.local_name: file.name for file in files for shard in file.shards}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    config: dict[str, Any] = hf_config(shape)
    if like is not None:
        config = json.loads((like / CONFIG).read_text(encoding="utf-8"))
        if config.get("num_nextn_predict_layers"):
            config["num_nextn_predict_layers"] = 0  # their weights are not read, and would not be the model's any more
    for key in ("dtype", "torch_dtype"):  # the newer and the older name
        config[key] = dtype
    _write_json(folder / CONFIG, config)
    for source, names in ((tokenizer, TOKENIZER), (like, ("generation_config.json",))):
        for name in names:
            if source is not None and (source / name).is_file():
                shutil.copyfile(source / name, folder / name)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
