"""Columns of a batch as the losses take them."""

from __future__ import annotations

import torch

from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.tensors import TensorBatch


def training_mask(batch: DataProto | TensorBatch) -> torch.Tensor:
    """fp32 (N, longest response): 1 on the tokens that count, those that the model wrote without those rejected."""
    return batch.padded("loss_mask" if "loss_mask" in batch.tokens else "response_mask").float()


def padded_if_there(batch: DataProto | TensorBatch, name: str) -> torch.Tensor | None:
    """A column that only some jobs have, right-padded: (N, longest row)."""
    return batch.padded(name) if name in batch.tokens else None
