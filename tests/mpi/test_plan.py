"""The planner's bytes against the live tensors of real ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hpcrl.config.schema import OptimConfig
from hpcrl.engine.engine import TrainEngine
from hpcrl.forecast.memory.state import RoleModel
from tests.forecast.memory.passes import TOKENS, loss, make_batch, make_pass
from tests.live_bytes import LiveBytes
from tests.mpi.layouts import LAYOUTS, SHAPE, role_groups

pytestmark = pytest.mark.ci_world(4)

OPTIM = OptimConfig(lr=1e-3)
WIDE = replace(SHAPE, vocab_size=1000)
DTYPES = (torch.float32, torch.bfloat16)
QUICK = ("tp4", "tp2pp2", "pp2cp2vpp2")
SLOW = ("tp2dp2", "cp4", "tp2pp2vpp2")


def case(index: int, turn: int) -> object:
    """The dtypes take turns."""
    (layout,), marks = LAYOUTS[index].values, list(LAYOUTS[index].marks)
    if index % 2 != turn or layout not in (*QUICK, *SLOW):
        marks.append(pytest.mark.exhaustive)
    elif layout not in QUICK:
        marks.append(pytest.mark.slow)
    return pytest.param(layout, DTYPES[turn], marks=marks)


@pytest.mark.parametrize(("layout", "dtype"), [case(index, turn) for index in range(len(LAYOUTS)) for turn in (0, 1)])
def test_a_rank_holds_what_was_planned(world, layout, dtype) -> None:
    groups = role_groups(world.rank, world.size)[layout]
    model = RoleModel(WIDE, groups.layout, "lm", dtype.itemsize, OPTIM)
    stage = groups.coord.pp
    with LiveBytes() as live:
        engine = TrainEngine(WIDE, groups, optim=OPTIM, dtype=dtype, total_steps=9, head_chunk_tokens=64)
        resident = live.live()
        assert resident == model.state(stage, world.rank).total
        live.restart_peak()
        engine.train(make_batch(), max_tokens=TOKENS, loss=loss, entropy=True)
        planned = replace(make_pass(model, entropy=True), chunk_tokens=64)
        assert sum(planned.training(stage)) == pytest.approx(live.peak - resident, rel=0.1)
