"""Scores, made where the responses are: each home rank of the rollout role scores its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from hpcrl.algorithms.metrics import Sum
from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.controller.register import Dispatch, register
from hpcrl.controller.worker import Worker
from hpcrl.data.prompts import PromptDataset
from hpcrl.grid.layout import Layout
from hpcrl.rewards.manager import RewardManager, ScoreRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RewardWorker(Worker):
    """`manager` is None on ranks that are no home: they have nothing to score."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        manager: RewardManager | None,
        tokenizer: PreTrainedTokenizerBase,
        prompts: dict[str, PromptDataset],
    ) -> None:
        super().__init__(layout, rank)
        self.manager = manager
        self.tokenizer = tokenizer
        self.prompts = prompts

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("input_ids", "response_mask", "row", "finish_reason", "show?"),
        writes=("token_level_scores",),
        homes_only=True,
    )
    def score(self, batch: DataProto) -> DataProto:
        """Scores of whole responses, placed on their last token; per sample `score`, and `acc` (NaN if there is none).

        Where the batch has a bool column `show`, the texts of those rows come back too, for people to read.
        """
        assert self.manager is not None
        prompts = self.prompts[batch.meta_info["split"]]
        lengths = batch.fetch("response_mask").lengths
        texts = self.tokenizer.batch_decode(answer_ids(batch, int(self.tokenizer.eos_token_id)))
        items = []
        rows, reasons = batch.samples["row"].tolist(), batch.samples["finish_reason"].tolist()
        for row, text, reason in zip(rows, texts, reasons, strict=True):
            record = prompts.record(row)
            items.append(
                ScoreRequest(record["data_source"], text, record["ground_truth"], record["extra_info"], reason)
            )
        scores, extras, counts = self.manager.score(items)
        values = torch.zeros(int(lengths.sum()))
        ends = lengths.cumsum(0)[lengths > 0] - 1
        values[ends] = torch.from_numpy(scores)[lengths > 0]
        acc = extras.get("acc", np.full(len(items), np.nan, np.float32))
        samples = {"score": scores, "acc": acc if acc.dtype == np.float32 else scores}
        if "show" in batch.samples:
            show = batch.samples["show"].tolist()
            shown = [self._prompt_text(prompts, row) if wanted else "" for row, wanted in zip(rows, show, strict=True)]
            samples["prompt_text"] = np.array(shown, object)
            samples["response_text"] = np.array(
                [t if wanted else "" for t, wanted in zip(texts, show, strict=True)], object
            )
        return DataProto(
            {"token_level_scores": Ragged.from_lengths(values, lengths)},
            samples,
            {"metrics": {name: Sum(count) for name, count in counts.items()}},
        )

    def _prompt_text(self, prompts: PromptDataset, row: int) -> str:
        return self.tokenizer.decode(prompts.prompt_ids(row).tolist())

    @register(Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        if self.manager is not None:
            self.manager.close()


def answer_ids(batch: DataProto, eos_token_id: int) -> list[list[int]]:
    """The response of every row without the end-of-sequence token that closed it.

    Other special tokens stay and show in the text: a scorer must not take an answer with one inside for a clean one.
    """
    sequences = batch.fetch("input_ids")
    lengths = batch.fetch("response_mask").lengths.tolist()
    ends = sequences.offsets[1:].tolist()
    answers = []
    for end, length in zip(ends, lengths, strict=True):
        ids = sequences.values[end - length : end].tolist()
        answers.append(ids[:-1] if ids and ids[-1] == eos_token_id else ids)
    return answers
