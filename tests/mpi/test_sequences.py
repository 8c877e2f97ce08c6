"""Samples of several sequences: every layout computes and trains them as it does the sequences as samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.engine.engine import TrainEngine
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.groups import RoleGroups
from tests.mpi.layouts import (
    DEEPSEEK,
    DELTA,
    GPT_OSS,
    HYBRID,
    SGD,
    SHAPE,
    assert_slices,
    gradients,
    make_batch,
    part_of,
    policy_loss,
    value_engine,
)

CASES = {
    **{f"{name}-single": (shape, "single", 1) for name, shape in (("gpt-oss", GPT_OSS), ("deepseek", DEEPSEEK))},
    **{f"dense-{layout}": (SHAPE, layout, 2) for layout in ("tp2", "pp2", "cp2", "dp2")},
    "hybrid-tp2": (HYBRID, "tp2", 2),
    "delta-pp2": (DELTA, "pp2", 2),
}


def cut_samples() -> DataProto:
    """Responses with up to two cuts. The first token of a sequence does not count, as it is its prompt."""
    batch = make_batch()
    ids, mask = batch.fetch("input_ids"), batch.fetch("response_mask")
    prompts, starts, number = ids.lengths - mask.lengths, [], 0
    for row, (prompt, length) in enumerate(zip(prompts, ids.lengths, strict=True)):
        inside = np.arange(prompt + 1, length)
        starts.append(
            inside[[len(inside) // 3, 2 * len(inside) // 3]] if len(inside) > 5 else inside[len(inside) // 2 :][:1]
        )
        mask.row(row)[starts[-1] - prompt] = 0
        number += len(starts[-1])
    assert number > len(batch)
    return DataProto({**batch.tokens, "sequence_starts": Ragged.from_rows(starts, np.int32)})


def sequences_of(batch: DataProto) -> DataProto:
    """Each sequence as a sample of its own, with a prompt of one token if it is not the first."""
    rows: dict[str, list[np.ndarray]] = {"input_ids": [], "response_mask": [], "advantages": []}
    for row in range(len(batch)):
        columns = {name: batch.fetch(name).row(row) for name in rows}
        length = len(columns["input_ids"])
        prompt = length - len(columns["response_mask"])
        bounds = [0, *batch.fetch("sequence_starts").row(row).tolist(), length]
        for first, end in zip(bounds, bounds[1:], strict=False):
            rows["input_ids"].append(columns["input_ids"][first:end])
            for name in ("response_mask", "advantages"):
                rows[name].append(columns[name][max(first + 1, prompt) - prompt : end - prompt])
    return DataProto({name: Ragged.from_rows(of_rows) for name, of_rows in rows.items()})


def counted(columns: dict[str, Ragged], batch: DataProto) -> np.ndarray:
    (column,) = columns.values()
    return column.values[batch.fetch("response_mask").values == 1]


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        pytest.param(*case[:2], marks=[pytest.mark.world(case[2]), *[pytest.mark.exhaustive] * (case[0] is DELTA)])
        for case in CASES.values()
    ],
    ids=CASES,
)
def test_sequences_are_samples_for_the_model(groups: dict[str, RoleGroups], shape: ModelShape, layout: str) -> None:
    batch, options = cut_samples(), {"max_tokens": 64, "temperature": 0.7}
    apart, mine = sequences_of(batch), part_of(batch, groups[layout])
    engine, alone = (TrainEngine(shape, groups[name], optim=SGD, seed=3) for name in (layout, "alone"))
    if found := engine.log_probs(mine, **options):
        of_mine = sequences_of(mine)
        expected = counted(alone.log_probs(of_mine, **options), of_mine)
        np.testing.assert_allclose(counted(found, mine), expected, rtol=0, atol=1e-5)
    found = engine.train(mine, loss=policy_loss, entropy=True, **options)
    expected = alone.train(apart, loss=policy_loss, entropy=True, **options)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4) and found["grad_norm"] > 1e-3
    assert_slices(engine, gradients(engine), gradients(alone))


@pytest.mark.world(1)
def test_values_and_places_of_sequences(groups: dict[str, RoleGroups]) -> None:
    batch, critic = cut_samples(), value_engine(groups["alone"])
    apart = sequences_of(batch)
    found, expected = (counted(critic.values(it, max_tokens=64), it) for it in (batch, apart))
    torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(expected), rtol=0, atol=1e-5)
    for place in (0, 10_000):
        batch.tokens["sequence_starts"] = Ragged.from_rows([[place]] * len(batch), np.int32)
        with pytest.raises(InputError, match="sequence_starts has places outside of their samples"):
            critic.values(batch, max_tokens=64)
