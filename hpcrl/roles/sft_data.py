"""Prompts and answers as columns, made on the actor's home ranks."""

from __future__ import annotations

import numpy as np
import torch

from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.controller.register import Dispatch, register
from hpcrl.controller.worker import Worker
from hpcrl.data.sft import SftDataset
from hpcrl.grid.layout import Layout


class SftDataWorker(Worker):
    def __init__(self, layout: Layout, rank: int, answers: SftDataset) -> None:
        super().__init__(layout, rank)
        self.answers = answers

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("row",), writes=("input_ids", "response_mask"))
    def load(self, batch: DataProto) -> DataProto:
        """Sequences of the rows, prompt then answer; the mask covers the answer."""
        pairs = [self.answers.pair(row) for row in batch.samples["row"].tolist()]
        sequences = [torch.from_numpy(np.concatenate(pair)) for pair in pairs]
        lengths = torch.tensor([len(answer) for _, answer in pairs], dtype=torch.int64)
        return DataProto(
            {
                "input_ids": Ragged.from_rows(sequences, dtype=torch.int32),
                "response_mask": Ragged.from_lengths(torch.ones(int(lengths.sum()), dtype=torch.int32), lengths),
            }
        )
