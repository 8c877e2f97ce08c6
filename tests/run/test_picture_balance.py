"""Samples are assigned to replicas by the work on their tokens and on their pictures."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpcrl.batch.balance import balanced_assignment
from hpcrl.batch.data_proto import DataProto
from hpcrl.config.derive import check
from hpcrl.data.media import MediaItem
from hpcrl.data.picture_index import tower_tokens
from hpcrl.engine.pictures import tokens_of_towers
from hpcrl.jobs.sft import Sft
from hpcrl.jobs.train import Train
from hpcrl.model.hf.families import shape_from_hf
from hpcrl.run.pairs import PairsJob
from hpcrl.run.rollouts import assign_to_replicas
from tests.model.vision_models import make_vision_batch, make_vision_model

PATCHES = np.array([4000, 0, 16, 16, 0, 64, 16, 0])  # of each row's picture; 0: none
CONFIG = Train.schema().model_validate(
    {"data": {"train_files": ["none"], "train_batch_size": 8}, "actor": {"ppo_mini_batch_size": 8}}
)


class Rows:
    def media(self, row: int) -> list[MediaItem]:
        return [MediaItem(row, 1, (1, 2, int(PATCHES[row]) // 2), 1.0)] if PATCHES[row] else []


@pytest.fixture(scope="module")
def inputs() -> Any:
    shape = shape_from_hf(make_vision_model("qwen2.5-vl").config.to_dict())
    trained = replace(shape, vision=replace(shape.vision, train="merger"))
    rows = Rows()
    return SimpleNamespace(shape=trained, frozen=shape, prompts={"train": rows}, sequences={"train": rows})


def test_a_row_counts_in_the_assignment_as_in_micro_batches(inputs: Any) -> None:
    column = make_vision_batch(make_vision_model("qwen2.5-vl")).pictures

    class Shown:
        def media(self, row: int) -> list[MediaItem]:
            grids = column.grids[column.items.row(row)].tolist()
            return [MediaItem(0, 0, (time, height, width), 1.0) for time, height, width in grids]

    rows = np.array([3, 0, 3, 1, 7])
    expected = tokens_of_towers(column, inputs.shape)[rows]
    assert expected.max() > 0 and expected.min() == 0
    assert np.array_equal(tower_tokens(Shown(), rows, inputs.shape), expected)
    assert not tower_tokens(Shown(), rows, inputs.frozen).any()


def test_a_huge_picture_is_balanced_with_trained_towers_and_does_not_count_with_frozen_ones(inputs: Any) -> None:
    rows, derived = np.repeat(np.array([5, 0, 2, 7, 1, 3, 6, 4]), 2), check(CONFIG, 2)
    prompts, lengths = np.repeat(np.arange(8), 2), 20 + 3 * np.arange(16)
    work = lengths + tower_tokens(Rows(), rows, inputs.shape)
    assert work[rows == 0].sum() > work[rows != 0].sum()  # the prompt with the huge picture is more than half of all

    def replicas(shape: Any) -> np.ndarray:
        samples = {"row": rows, "prompt": prompts, "prompt_length": lengths - 9, "response_length": np.full(16, 9)}
        batch = DataProto({}, samples, {"num_prompts": 8, "step": 1})
        metrics = assign_to_replicas(batch, CONFIG, derived, replaced(inputs, shape))
        assert metrics["global_seqlen/mean"] == lengths.sum() / 2
        return batch.samples["replica_of_2"]

    found = replicas(inputs.shape)
    assert np.array_equal(found == found[rows == 0][0], rows == 0)
    assert np.array_equal(replicas(inputs.frozen), balanced_assignment(lengths, 2, groups=prompts))


@pytest.mark.parametrize("is_trained", [True, False])
def test_supervised_jobs_count_pictures_too(inputs: Any, is_trained: bool) -> None:
    rows, lengths = np.arange(8), np.full(8, 30)
    shown = replaced(inputs, inputs.shape if is_trained else inputs.frozen)
    job: Any = SimpleNamespace(
        derived=check(CONFIG, 2), inputs=shown, lengths={"train": lengths}, pair_lengths={"train": 2 * lengths}
    )
    shown.pairs = shown.prompts
    for found in (Sft.balanced(job, "train", rows), PairsJob.pairs(job, "train", rows)[np.arange(0, 16, 2)]):
        first = found.samples["replica_of_2"] == found.samples["replica_of_2"][0]
        assert first.sum() == (1 if is_trained else 4)


def replaced(inputs: Any, shape: Any) -> Any:
    return SimpleNamespace(**{**vars(inputs), "shape": shape})
