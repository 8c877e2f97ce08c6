"""Samples are assigned to replicas by the work on their tokens and on their pictures."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.packing import balanced_assignment
from hpcrl.batch.pictures import PictureColumn
from hpcrl.config.derive import check
from hpcrl.data.image_loader import tower_tokens
from hpcrl.data.media import MediaItem
from hpcrl.engine.microbatch import tokens_of_towers
from hpcrl.jobs.sft import Sft
from hpcrl.jobs.train import Train
from hpcrl.model.families.config_json import shape_from_hf
from hpcrl.model.shape import ModelShape
from hpcrl.run.pairs import PairsJob
from hpcrl.run.rollouts.choice import assign_to_replicas
from hpcrl.workers.prompt_pictures import PromptPictures
from tests.model.vision_models import SAMPLES, WIDE, make_vision_batch, make_vision_model

HUGE = SAMPLES.index((WIDE,))
CONFIG = Train.schema().model_validate(
    {"data": {"train_files": ["none"], "train_batch_size": 8}, "actor": {"ppo_mini_batch_size": 8}}
)


@pytest.fixture(scope="module")
def column() -> PictureColumn:
    """The pictures of 8 samples, one of them with as much work as all others together."""
    found = make_vision_batch(make_vision_model("qwen2.5-vl")).pictures
    grids = np.where((found.grids == WIDE.grid).all(1, keepdims=True), [[1, 60, 80]], found.grids)
    return replace(found, grids=grids.astype(np.int32))


def shape_of(train: str) -> ModelShape:
    shape = shape_from_hf(make_vision_model("qwen2.5-vl").config.to_dict())
    return replace(shape, vision=replace(shape.vision, train=train))


@pytest.mark.parametrize("train", ["merger", "none"])
def test_of_responses(column: PictureColumn, train: str) -> None:
    """A frozen tower's work is done where they were drawn."""
    prompts, lengths = np.repeat(np.arange(8), 2), 20 + 3 * np.arange(16)
    pictures: Any = PromptPictures(None, shape_of(train), None, 0, {}, None, is_leader=True)  # type: ignore[arg-type]
    work = pictures.work_of(column.take(prompts))
    samples = {"prompt": prompts, "prompt_length": lengths - 9, "response_length": np.full(16, 9), **work}
    batch = DataProto({}, samples, {"num_prompts": 8, "step": 1})
    metrics = assign_to_replicas(batch, CONFIG, check(CONFIG, 2))
    found = batch.samples["replica_of_2"]
    assert metrics["global_seqlen/mean"] == lengths.sum() / 2
    if train == "none":
        assert np.array_equal(found, balanced_assignment(lengths, 2, groups=prompts))
    else:
        assert np.array_equal(found == found[2 * HUGE], prompts == HUGE)


@pytest.mark.parametrize("train", ["merger", "none"])
def test_of_answers_in_files(column: PictureColumn, train: str) -> None:
    class Rows:
        def media(self, row: int) -> list[MediaItem]:
            return [MediaItem(item, *picture) for item, picture in column.of_row(row)]

    shape, rows = shape_of(train), np.arange(8)
    expected = tokens_of_towers(column, shape) if train == "merger" else np.zeros(8)
    assert np.array_equal(tower_tokens(Rows(), rows, shape), expected)
    inputs = SimpleNamespace(shape=shape, sequences={"train": Rows()}, pairs={"train": Rows()})
    lengths = np.full(8, 30)
    job: Any = SimpleNamespace(
        derived=check(CONFIG, 2), inputs=inputs, lengths={"train": lengths}, pair_lengths={"train": 2 * lengths}
    )
    for found in (Sft.balanced(job, "train", rows), PairsJob.pairs(job, "train", rows)[np.arange(0, 16, 2)]):
        replicas = found.samples["replica_of_2"]
        assert (replicas == replicas[HUGE]).sum() == (1 if train == "merger" else 4)
