"""Columns as losses take them: on the device, right-padded."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcrl.batch.data_proto import DataProto, TensorBatch
from hpcrl.batch.ragged import Ragged


def make_batch() -> DataProto:
    tokens = {"old_log_probs": [[1.0, 2.0], [3.0]], "topk": [[1.0] * 4, [1.0] * 2]}
    return DataProto(
        {name: Ragged.from_rows(rows, np.float32) for name, rows in tokens.items()},
        {"uid": np.array(["a", "b"])},
        {"step": 3},
    )


def test_a_batch_on_a_device_pads_its_columns_there():
    """Losses compute on a GPU with columns that rest on the CPU. The meta device refuses to mix with the CPU's."""
    device = torch.device("meta")
    batch = TensorBatch(make_batch(), device)
    assert batch.padded("old_log_probs").device == batch.tokens["topk"].padded_vectors(2).device == device
    assert batch.padded("old_log_probs").shape == (2, 2) and batch.tokens["topk"].padded_vectors(2).shape == (2, 2, 2)
    assert (batch.padded("old_log_probs") * torch.ones(2, 2, device=device)).device == device
    assert batch.samples["uid"].tolist() == ["a", "b"] and batch.meta_info == {"step": 3}


def test_columns_on_the_cpu_are_not_copied():
    rests = make_batch()
    batch = TensorBatch(rests, torch.device("cpu"))
    assert batch.tokens["topk"].values.data_ptr() == rests.fetch("topk").values.ctypes.data
    assert torch.equal(batch.padded("old_log_probs", fill=-1), torch.tensor([[1.0, 2.0], [3.0, -1.0]]))
    with pytest.raises(KeyError, match="no token-level column 'values'; there are"):
        batch.padded("values")
