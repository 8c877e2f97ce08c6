"""Small random vision-language models from `transformers`, and samples with pictures for them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.pictures import PictureColumn
from hpcrl.batch.ragged import Ragged
from hpcrl.model.families.config_json import shape_from_hf
from hpcrl.model.shape import ModelShape

IMAGE, VIDEO, START, END = 46, 47, 48, 49
TEXT: dict[str, Any] = {
    "num_hidden_layers": 5,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 50,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "initializer_range": 0.1,
}
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
ROPE = {"rope_type": "default", "rope_theta": 100.0}
VISION_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}},
        {"depth": 2, "window_size": 8, "fullatt_block_indexes": [1]},
    ),
    "qwen3-vl": (
        "Qwen3VL",
        {"head_dim": 8, "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}},
        {"depth": 3, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
    ),
}
DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 16,
    "initializer_range": 0.05,  # with 0.1 rounding errors grow tenfold
    "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5},
}
VISION_MODELS["qwen3.5"] = ("Qwen3_5", DELTA, {"depth": 3, "num_position_embeddings": 16})
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "mlp_only_layers": [1]}
VISION_MODELS["qwen3-vl-moe"] = ("Qwen3VLMoe", VISION_MODELS["qwen3-vl"][1] | EXPERTS, VISION_MODELS["qwen3-vl"][2])


def vision_config(name: str, text: dict[str, Any], tower: dict[str, Any]) -> transformers.PretrainedConfig:
    architecture, own_text, own_tower = VISION_MODELS[name]
    sections = {"text_config": {**TEXT, **own_text, **text}, "vision_config": {**TOWER, **own_tower, **tower}}
    return getattr(transformers, f"{architecture}Config")(**sections, **IDS)


def vision_shape(name: str, text: dict[str, Any], tower: dict[str, Any]) -> ModelShape:
    """The shape of a model with other sizes."""
    return shape_from_hf(vision_config(name, text, tower).to_dict())


def make_vision_model(name: str, **text: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    architecture, _, _ = VISION_MODELS[name]
    model = getattr(transformers, f"{architecture}ForConditionalGeneration")(vision_config(name, text, {}))
    with torch.no_grad():  # biases and norms start as constants, which a mistake would not change
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def save_vision_model(model: transformers.PreTrainedModel, folder: Path, **options: Any) -> None:
    """As published. The matrices of experts are transposed there; `transformers` 5 reads that, and writes another."""
    if model.config.model_type == "qwen3_vl_moe":
        tensors = {name: weight.mT if "mlp.experts." in name else weight for name, weight in model.state_dict().items()}
        options["state_dict"] = {name: tensor.contiguous() for name, tensor in tensors.items()}
        options["save_original_format"] = False
    model.save_pretrained(folder, **options)


class Shown(NamedTuple):
    """What a sample shows: a picture, or a video with the seconds between two of its steps. grid: patches."""

    seed: int
    grid: tuple[int, int, int]
    seconds: float | None = None

    def patches(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(math.prod(self.grid), 3 * 2 * 2 * 2, generator=generator)


A, B, WIDE = Shown(1, (1, 4, 6)), Shown(2, (1, 2, 2)), Shown(3, (1, 2, 40))
FILM = Shown(4, (3, 4, 4), 0.7)
# Several pictures, none, a video, a wide one, pictures that other samples have, a picture and a video.
SAMPLES: tuple[tuple[Shown, ...], ...] = ((A, B), (), (FILM,), (WIDE,), (B,), (), (A, FILM), (B, A, B))


class Sample(NamedTuple):
    ids: list[int]
    placeholders: list[tuple[int, Shown, int]]  # first token, picture, step in time or -1 for all
    num_response: int


def make_sample(model: transformers.PreTrainedModel, shown: tuple[Shown, ...], seed: int) -> Sample:
    """Text with pictures between; of Qwen3-VL, whose videos have text between two steps, one run per step."""
    generator = torch.Generator().manual_seed(100 + seed)

    def text(num: int) -> list[int]:
        return torch.randint(2, IMAGE, (num,), generator=generator).tolist()

    ids, placeholders = text(3), []
    for each in shown:
        time, height, width = each.grid
        token = IMAGE if each.seconds is None else VIDEO
        parts = range(time) if each.seconds and model.config.model_type != "qwen2_5_vl" else [-1]
        for part in parts:
            ids += [*text(2), START]
            placeholders.append((len(ids), each, part))
            ids += [token] * (height * width // 4 * (time if part < 0 else 1)) + [END]
    return Sample(ids + text(8 + seed), placeholders, 6 + seed)


def make_samples(model: transformers.PreTrainedModel) -> list[Sample]:
    return [make_sample(model, shown, seed) for seed, shown in enumerate(SAMPLES)]


def make_vision_batch(model: transformers.PreTrainedModel) -> DataProto:
    """The samples as a batch, with responses and advantages as tests.mpi.layouts has them."""
    samples = make_samples(model)
    items: dict[tuple[int, int], int] = {}
    grids, intervals, values = [], [], []
    numbers, starts = [], []
    for sample in samples:
        row = []
        for _, shown, part in sample.placeholders:
            if (shown.seed, part) not in items:
                items[shown.seed, part] = len(items)
                patches = shown.patches()
                each = math.prod(shown.grid[1:])
                grids.append((1, *shown.grid[1:]) if part >= 0 else shown.grid)
                values.append((patches[part * each : (part + 1) * each] if part >= 0 else patches).flatten())
                speed = model.config.vision_config.tokens_per_second if part < 0 and shown.seconds else 1
                intervals.append(speed * (shown.seconds or 1.0) if part < 0 else 1.0)
            row.append(items[shown.seed, part])
        numbers.append(row)
        starts.append([start for start, _, _ in sample.placeholders])
    column = PictureColumn(
        Ragged.from_rows(numbers, np.int64),
        Ragged.from_rows(starts, np.int64),
        np.array([1000 * seed + part for seed, part in items], np.int64),
        np.array(grids, np.int32),
        np.array(intervals, np.float32),
        Ragged.from_rows([patches.numpy() for patches in values], np.float32),
    )
    responses = [sample.num_response for sample in samples]
    generator = torch.Generator().manual_seed(0)
    total = sum(responses)
    columns = {
        "response_mask": (torch.rand(total, generator=generator) < 0.9).float(),
        "advantages": torch.randn(total, generator=generator),
    }
    tokens = {name: Ragged.from_lengths(each, responses) for name, each in columns.items()}
    ids = Ragged.from_rows([sample.ids for sample in samples], np.int32)
    return DataProto({"input_ids": ids, "pictures": column, **tokens})


def their_log_probs(model: transformers.PreTrainedModel, sample: Sample) -> torch.Tensor:
    """Log-probs of the response by `transformers`, with its own positions and placeholders; differentiable."""
    ids = torch.tensor([sample.ids])
    shown = list(dict.fromkeys((each, start if part < 0 else -1) for start, each, part in sample.placeholders))
    inputs: dict[str, Any] = {"mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int()}
    for values, grids, is_video in (
        ("pixel_values", "image_grid_thw", False),
        ("pixel_values_videos", "video_grid_thw", True),
    ):
        mine = [each for each, _ in shown if (each.seconds is not None) == is_video]
        if mine:
            inputs[values] = torch.cat([each.patches() for each in mine])
            inputs[grids] = torch.tensor([each.grid for each in mine])
    seconds = [each.seconds for each, _ in shown if each.seconds is not None]
    if seconds and model.config.model_type == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor(seconds)
    model.model.rope_deltas = None
    logits = model(input_ids=ids, **inputs).logits[0].float()
    targets = ids[0, 1:, None]
    return logits.log_softmax(-1)[:-1].gather(1, targets)[-sample.num_response :, 0]
