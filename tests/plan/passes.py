"""A batch that an engine runs in three full micro-batches, and how the planner sees it."""

from __future__ import annotations

import numpy as np
import torch

from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.batch.tensors import TensorBatch
from hpcrl.plan.activations import Pass
from hpcrl.plan.state import RoleModel

PROMPT, RESPONSE, SAMPLES = 40, 56, 12
LENGTH = PROMPT + RESPONSE
TOKENS = 4 * LENGTH  # of a micro-batch


def make_batch() -> DataProto:
    ids = np.arange(SAMPLES * LENGTH, dtype=np.int32) % 900
    mask = np.ones(SAMPLES * RESPONSE, np.int32)
    columns = {
        "input_ids": Ragged.from_lengths(ids, [LENGTH] * SAMPLES),
        "response_mask": Ragged.from_lengths(mask, [RESPONSE] * SAMPLES),
    }
    return DataProto(columns, {"uid": np.array([str(number) for number in range(SAMPLES)], dtype=object)})


def make_pass(model: RoleModel, *, entropy: bool) -> Pass:
    """How the planner sees it."""
    cp, count = model.layout.cp, model.layout.scheduled(SAMPLES // 4)
    each = SAMPLES // count
    tokens, rows = each * LENGTH // cp, each * RESPONSE // cp
    return Pass(model, tokens, rows, count, on_gpu=False, entropy=entropy, longest=LENGTH)


def loss(outputs: dict[str, torch.Tensor], batch: TensorBatch) -> tuple[torch.Tensor, dict]:
    return sum(output.sum() for output in outputs.values()), {}
