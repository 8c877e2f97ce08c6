"""A batch that an engine runs in three full micro-batches, and how the planner sees it."""

from __future__ import annotations

import numpy as np
import torch

from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.plan.activations import Pass
from hpcrl.plan.state import RoleModel

PROMPT, RESPONSE, SAMPLES = 40, 56, 12
LENGTH = PROMPT + RESPONSE
TOKENS = 4 * LENGTH  # of a micro-batch


def make_batch() -> DataProto:
    ids = torch.arange(SAMPLES * LENGTH, dtype=torch.int32) % 900
    mask = torch.ones(SAMPLES * RESPONSE, dtype=torch.int32)
    columns = {
        "input_ids": Ragged.from_lengths(ids, torch.full((SAMPLES,), LENGTH)),
        "response_mask": Ragged.from_lengths(mask, torch.full((SAMPLES,), RESPONSE)),
    }
    return DataProto(columns, {"uid": np.array([str(number) for number in range(SAMPLES)], dtype=object)})


def make_pass(model: RoleModel, *, entropy: bool) -> Pass:
    """How the planner sees it."""
    cp, count = model.layout.cp, model.layout.scheduled(SAMPLES // 4)
    each = SAMPLES // count
    tokens, rows = each * LENGTH // cp, each * RESPONSE // cp
    return Pass(model, tokens, rows, count, on_gpu=False, entropy=entropy, longest=LENGTH)


def loss(outputs: dict[str, torch.Tensor], batch: DataProto) -> tuple[torch.Tensor, dict]:
    return sum(output.sum() for output in outputs.values()), {}
