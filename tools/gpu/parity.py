"""Layouts of all ranks compute what one rank computes: log-probs, gradient norm and gradients of small fp32 models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.engine.engine import TrainEngine
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.groups import RoleGroups, make_groups
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.world import World
from tests.mpi.layouts import MIXTURE, SGD, SHAPE, gradients, make_batch, part_of, policy_loss, slice_errors
from tools.gpu.outcome import Skip, print_head, print_row, require

# The rest are replicas.
DENSE = ({"tp": 2}, {"pp": 2}, {"cp": 2}, {}, {"tp": 2, "cp": 2}, {"tp": 2, "pp": 2, "vpp": 2}, {"tp": 4})
EXPERTS = ({"ep": 2}, {"tp": 2, "etp": 2}, {"ep": 4}, {"pp": 2, "ep": 2}, {"cp": 2, "ep": 2})
MOST = 1e-4  # log-probs absolute; norms relative; gradients of their norm
SIZES: dict[str, Any] = {"max_tokens": 64, "temperature": 0.7}


class Result(NamedTuple):
    """log_probs: of response tokens, none where this rank has no last stage. gradients: on the host."""

    engine: TrainEngine
    log_probs: Ragged | None
    norm: float
    gradients: dict[str, Tensor]


def layouts(world: World) -> str:
    if world.size == 1:
        raise Skip("one rank has one layout")
    everyone, batch = tuple(range(world.size)), make_batch(2 * world.size + 1)
    cases = dict(layouts_of(everyone))
    named = {f"{number}": layout for number, layout in enumerate(cases.values())}
    roles = make_groups({**named, **{f"rank {rank}": Layout((rank,)) for rank in everyone}}, world.rank)
    alone = {shape: computed(shape, roles[f"rank {world.rank}"], batch) for shape in (SHAPE, MIXTURE)}
    most = 0.0
    print_head(world, "layout", "log-probs", "gradient norm, relative", "gradients, of their norm")
    for number, (shape, name) in enumerate(cases):
        mine = errors(computed(shape, roles[str(number)], part_of(batch, roles[str(number)])), alone[shape])
        worst = [max(each) for each in zip(*world.all_gather_object(mine), strict=True)]
        print_row(world, name + ", experts" * (shape is MIXTURE), *(f"{error:.1e}" for error in worst))
        most = max(most, *worst)
    line = f"{len(cases)} layouts of {world.size} ranks differ from one rank by {most:.1e}"
    require(most <= MOST, f"{line}; expected at most {MOST:.0e}")
    return f"{line}, of {MOST:.0e}"


def layouts_of(ranks: tuple[int, ...]) -> Iterator[tuple[tuple[ModelShape, str], Layout]]:
    """Of each model those whose sizes divide the ranks, by name."""
    for shape, each in ((SHAPE, DENSE), (MIXTURE, EXPERTS)):
        for sizes in each:
            with suppress(ValueError):
                layout = Layout(ranks, **sizes)
                yield (shape, name_of(layout)), layout


def name_of(layout: Layout) -> str:
    axes = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
    return " ".join(f"{axis.upper()}{getattr(layout, axis)}" for axis in axes if getattr(layout, axis) > 1)


def computed(shape: ModelShape, groups: RoleGroups, batch: DataProto) -> Result:
    engine = TrainEngine(shape, groups, optim=SGD, seed=3)
    log_probs = engine.log_probs(batch, **SIZES).get("log_probs")
    norm = engine.train(batch, loss=policy_loss, entropy=True, **SIZES)["grad_norm"]
    return Result(engine, log_probs, norm, {name: it.cpu() for name, it in gradients(engine).items()})


def errors(found: Result, alone: Result) -> tuple[float, float, float]:
    """This rank's largest ones, of log-probs, gradient norm and gradients."""
    gap = 0.0
    if found.log_probs is not None:
        expected = part_of(DataProto({"log_probs": alone.log_probs}), found.engine.groups).tokens["log_probs"]
        gap = float(np.abs(found.log_probs.values - expected.values).max(initial=0.0))
    turned = max(slice_errors(found.engine, found.gradients, alone.gradients).values(), default=0.0)
    return gap, abs(found.norm / alone.norm - 1), turned
