"""A batch that an engine runs in three full micro-batches, and how the planner sees it."""

from __future__ import annotations

import numpy as np
import torch

from hpcrl.batch.data_proto import DataProto, TensorBatch
from hpcrl.batch.pictures import PictureColumn, PicturePlaces
from hpcrl.batch.ragged import Ragged
from hpcrl.forecast.memory.activations import Pass
from hpcrl.forecast.memory.state import RoleModel
from hpcrl.model.vision import Vision

DTYPES = {4: torch.float32, 2: torch.bfloat16}
PROMPT, RESPONSE, SAMPLES = 40, 56, 12
LENGTH = PROMPT + RESPONSE
TOKENS = 4 * LENGTH  # of a micro-batch
GRID, PICTURE_TOKENS = (1, 8, 16), 32  # of a picture, with 4 patches in a token


def make_batch() -> DataProto:
    ids = np.arange(SAMPLES * LENGTH, dtype=np.int32) % 900
    mask = np.ones(SAMPLES * RESPONSE, np.int32)
    columns = {
        "input_ids": Ragged.from_lengths(ids, [LENGTH] * SAMPLES),
        "response_mask": Ragged.from_lengths(mask, [RESPONSE] * SAMPLES),
    }
    return DataProto(columns, {"uid": np.array([str(number) for number in range(SAMPLES)], dtype=object)})


def with_pictures(batch: DataProto, vision: Vision) -> DataProto:
    """The batch with a picture of its own in each prompt: patches, or features for a frozen tower."""
    frozen = vision.train == "none"
    width = PICTURE_TOKENS * vision.feature_width if frozen else GRID[1] * GRID[2] * vision.patch_width
    each = np.ones(SAMPLES, np.int64)
    places = PicturePlaces(
        Ragged.from_lengths(np.arange(SAMPLES), each),
        Ragged.from_lengths(np.full(SAMPLES, 4), each),
        np.arange(SAMPLES),
        np.array([GRID] * SAMPLES, np.int32),
        np.ones(SAMPLES, np.float32),
    )
    column = PictureColumn.of(places, [np.ones(width, np.float32)] * SAMPLES, are_features=frozen)
    ids = batch.fetch("input_ids")
    few = Ragged.from_lengths(ids.values % 40, ids.lengths)
    return DataProto({**batch.tokens, "input_ids": few, "pictures": column}, batch.samples)


def make_pass(model: RoleModel, *, entropy: bool) -> Pass:
    """How the planner sees it."""
    cp, count = model.layout.cp, model.layout.scheduled(SAMPLES // 4)
    each = SAMPLES // count
    tokens, rows = each * LENGTH // cp, each * RESPONSE // cp
    return Pass(model, tokens, rows, count, on_gpu=False, entropy=entropy, longest=LENGTH)


def loss(outputs: dict[str, torch.Tensor], batch: TensorBatch) -> tuple[torch.Tensor, dict]:
    return sum(output.sum() for output in outputs.values()), {}
