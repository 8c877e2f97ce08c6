"""The search finds what computing every candidate finds, and what an exact search found before; what it returns fits,
and can be written and read. Candidates that the config's rules allow; slices of a run."""

from __future__ import annotations

import argparse
import itertools
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.loader import load_config
from hpcrl.config.schema import Config, JobConfig, seconds_of
from hpcrl.config.yaml_core import ConfigError
from hpcrl.forecast.memory.fixes import tightest
from hpcrl.forecast.memory.memory import TrainingPlan, with_keys
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.search import AXES, GRANULARITY, Result, Search, Space
from hpcrl.forecast.time.search_command import (
    Asked,
    Division,
    Slice,
    clock,
    describe,
    differences,
    divide,
    nodes_of,
    order,
    shortest,
    write,
)
from hpcrl.forecast.time.step import predict
from hpcrl.forecast.time.table import lengths_of
from hpcrl.jobs.sft import Sft
from hpcrl.jobs.train import Train
from hpcrl.machine.machine_file import read_machine
from hpcrl.runtime.exits import InputError, is_user_error
from tests.forecast.time.machines import gpu

ROOT = Path(__file__).parents[3]
MACHINE = gpu()
LENGTHS = Lengths.fixed(256, 768)
SMALL = {  # 1.3 B parameters on GPUs with 24 GiB: memory excludes some
    "model.num_layers": 8,
    "model.hidden_size": 2048,
    "model.ffn_hidden_size": 8192,
    "model.num_attention_heads": 16,
    "model.num_query_groups": 8,
    "model.vocab_size": 32000,
    "model.max_position_embeddings": 4096,
    "model.dtype": "bfloat16",
    "data.max_prompt_length": 256,
    "data.max_response_length": 768,
    "data.train_batch_size": 64,
    "actor.ppo_mini_batch_size": 32,
    "actor.ppo_max_token_len_per_gpu": 4096,
    "rollout.engine": "native",
    "rollout.max_num_seqs": 64,
    "job.gpus_per_node": 8,
    "job.gpu_memory_gib": 24.0,
    "job.nodes": 1,
}
EXPERTS = {
    "model.family": "mixtral",
    "model.rope_scaling": None,
    "model.num_experts": 4,
    "model.moe_topk": 2,
    "model.moe_ffn_hidden_size": 8192,
}


def small(ranks: int, **changes: object) -> Config:
    config = load_config(ROOT / "configs" / "grpo_8b.yaml")
    return with_keys(config, {**SMALL, "job.ntasks_per_node": ranks, **changes})


def every_candidate(space: Space) -> Iterator[TrainingPlan]:
    for placement, granularity in itertools.product(space.placements(), space.granularities):
        choices = [
            [
                {**grid, **work, **moved}
                for grid in space.grids(role, len(space.place(placement, (role,))))
                for work in space.work(role)
                for moved in space.offloads(role)
            ]
            for role in space.specs
        ]
        for chosen in itertools.product(*choices):
            keys = space.joined(placement, [{GRANULARITY: granularity}, *chosen])
            yield TrainingPlan(with_keys(space.template, keys))


def brute_force(space: Space) -> float:
    """Seconds of the fastest candidate that fits."""
    best = float("inf")
    for job in every_candidate(space):
        try:
            fits = tightest(job.rows()).total <= space.limit
            best = min(best, predict(job, MACHINE, LENGTHS).seconds if fits else best)
        except Exception as error:
            if not is_user_error(error):
                raise
    return best


MANY_SEQUENCES = {"data.train_batch_size": 256, "rollout.max_num_seqs": 512}  # which the KV cache limits
CASES = [
    (4, {}, ("tp", "offload"), ()),
    (4, {}, ("tp", "recompute"), ()),
    (4, {}, ("tp", "pools"), ("one_step_off", "sync")),
    (4, EXPERTS, ("ep", "etp", "pools"), ()),
    (2, MANY_SEQUENCES, ("tp", "kv_cache"), ()),
    (2, {"job.gpus_per_node": 0}, ("tp", "pp", "pools"), ()),  # memory has no limit
]


@pytest.mark.parametrize(("ranks", "changes", "varied", "modes"), CASES)
def test_search_finds_what_brute_force_finds(
    ranks: int, changes: dict[str, object], varied: tuple[str, ...], modes: tuple[str, ...]
) -> None:
    space = Space(small(ranks, **changes), 1, modes=modes, varied=varied)
    found = Search(space, MACHINE, LENGTHS).run()
    assert found[0].prediction.seconds == pytest.approx(brute_force(space), rel=1e-9)


def slow(*case: object) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


def exhaustive(*case: object) -> Any:
    return pytest.param(*case, marks=pytest.mark.exhaustive)


# Seconds of the winner that a best-first search with an optimality bound found over all partitions of the roles.
RECORDED = [
    ("grpo_8b", "dgx_h100", 2, None, "sync", 58.3872),
    exhaustive("grpo_8b", "dgx_h100", 8, "600,0.5", "sync", 11.5454),
    slow("grpo_8b", "b200_ib", 64, None, "sync", 2.8270),
    exhaustive("grpo_8b", "h100_slingshot", 64, None, "sync", 6.5335),
    exhaustive("grpo_8b", "dgx_h100", 4, "600,0.5", "bounded_staleness", 19.7157),
    exhaustive("ppo_70b", "dgx_h100", 8, "1500,0.6", "sync", 86.3083),
    exhaustive("ppo_70b", "dgx_h100", 16, "1500,0.6", "sync", 62.0232),
    exhaustive("ppo_70b", "dgx_h100", 64, "1500,0.6", "sync", 43.7746),
    exhaustive("ppo_70b", "dgx_h100", 16, "1500,0.6", "one_step_off", 44.2452),
    exhaustive("ppo_70b", "dgx_h100", 16, "1500,0.6", "bounded_staleness", 29.3837),
    exhaustive("ppo_70b", "mi300x", 8, None, "sync", 133.1813),
    exhaustive("ppo_70b", "dgx_a100", 32, None, "sync", 121.2219),
]


@pytest.mark.parametrize(("name", "machine", "nodes", "lengths", "mode", "seconds"), RECORDED)
def test_the_winner_is_as_fast_as_an_exact_search_found(
    name: str, machine: str, nodes: int, lengths: str | None, mode: str, seconds: float
) -> None:
    config, on = load_config(ROOT / "configs" / f"{name}.yaml"), read_machine(machine)
    its = Asked(name, config, (), on, lengths_of(TrainingPlan(config), lengths))
    found = Search(its.space(nodes, (mode,)), on, its.lengths).run()
    assert found[0].prediction.seconds <= 1.02 * seconds


def test_results_fit_and_are_valid() -> None:
    config = small(8)
    varied = (*AXES, "recompute", "offload", "kv_cache")
    found, again = (Search(Space(config, 2, varied=varied), MACHINE, LENGTHS).run() for _ in range(2))
    assert len(found) == 5 and [it.job.config for it in found] == [it.job.config for it in again]
    for result in found:
        job = TrainingPlan(result.job.config.model_validate(result.job.config.model_dump()))
        assert tightest(job.rows()).total == result.row.total <= job.capacity
        assert predict(job, MACHINE, LENGTHS).seconds == result.prediction.seconds


def test_the_file_that_is_written_is_read_back(tmp_path: Path) -> None:
    template, out = ROOT / "configs" / "grpo_8b.yaml", tmp_path / "best.yaml"
    base = Train.read_config(str(template))
    pools = {"placement.pools": {"all": "*", "generate": "0-7"}, "placement.rollout.pool": "generate"}
    changed = with_keys(base, {**pools, "placement.actor.tp": 2, "job.nodes": 4, "model.recompute.granularity": "full"})
    write(out, str(template), base, changed)
    assert Train.read_config(str(out)) == changed
    assert differences(base.model_dump(), base.model_dump()) == {}


@pytest.mark.parametrize("text", ["8..4", "0", "4..", "4-8", "x"])
def test_a_range_of_nodes_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--nodes"):
        nodes_of(text, 1)
    assert nodes_of("4..48", 1) == [4, 8, 16, 32, 48]


def asked(config: Config) -> Asked:
    return Asked("small.yaml", config, (), MACHINE, LENGTHS)


def test_the_objective_chooses_the_number_of_nodes() -> None:
    """Twice the nodes take less time per step, and more node-hours."""
    config = small(4, **{"job.time": "01:00:00", "job.signal_seconds": 300})
    few, many = (Search(Space(config, nodes, varied=("tp",)), MACHINE, LENGTHS).run()[0] for nodes in (1, 2))

    def best(objective: str, steps: int) -> Result:
        its = asked(with_keys(config, {"trainer.total_training_steps": steps}))
        its = replace(its, objective=objective)
        assert f"{steps} steps" in its.cost(few)
        return min((few, many), key=its.score)

    assert best("step", 10) is many and best("node-hours", 10) is few
    within = 3000 / few.prediction.seconds  # steps in an hour, with 300 s of set-up and as many at its end
    assert best("walltime", int(0.97 * within)) is few and best("walltime", int(1.03 * within)) is many


def test_of_a_model_that_fits_nowhere_the_line_has_the_nodes_that_it_needs() -> None:
    config = small(2, **{"job.gpu_memory_gib": 6.0})
    assert not Search(Space(config, 1), MACHINE, LENGTHS).run()
    line = asked(config).fits_nowhere(1)
    nodes = int(re.search(r"use --nodes (\d+)", line)[1])  # type: ignore[index]
    assert "small.yaml fits on 1 node in no layout" in line and "more than there are" in line
    assert Search(Space(config, nodes), MACHINE, LENGTHS).run()
    assert "does not fit on 1024 nodes either" in asked(small(2, **{"job.gpu_memory_gib": 0.5})).fits_nowhere(512)


@pytest.mark.parametrize(
    ("job", "changes", "text"),
    [
        (Train, {"machine": None}, "without --machine"),
        (Train, {"machine": "none_such"}, "no machine none_such"),
        (Train, {"nodes": "8..4"}, "--nodes 8..4 is empty"),
        (Train, {"modes": "async"}, "--modes async"),
        (Sft, {}, "is for jobs of `hpcrl train`"),
    ],
)
def test_bad_input_is_one_line(job: type[Train], changes: dict[str, object], text: str) -> None:
    options = {"machine": "dgx_h100", "nodes": None, "modes": None, "response_lengths": None, "out": None}
    options["objective"] = "step"
    with pytest.raises((ConfigError, InputError)) as caught:
        describe(job, str(ROOT / "configs" / "grpo_8b.yaml"), [], argparse.Namespace(**{**options, **changes}))
    assert text in str(caught.value) and "\n" not in str(caught.value)


def test_layouts_of_a_dense_model() -> None:
    """Llama 3.1 8B on 16 ranks: 8 query groups, 32 layers, tensor parallelism inside a node."""
    space = Space(load_config(ROOT / "configs" / "grpo_8b.yaml"), 2, varied=("tp", "pp"))
    found = {tuple(keys.values())[:2] for keys in space.grids("actor", 16)}
    assert found == {(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8, 16) if 16 % (tp * pp) == 0}
    assert [tuple(keys.values())[0] for keys in space.grids("rollout", 16)] == [1, 2, 4, 8]


@pytest.mark.parametrize(("name", "nodes"), [("grpo_8b", 2), ("ppo_70b", 8)])
@pytest.mark.parametrize("mode", ["sync", "one_step_off", "bounded_staleness"])
def test_placements_are_accepted(name: str, nodes: int, mode: str) -> None:
    """Of each mode, with every model whole on each rank; rank 0 is in no pool of an asynchronous job."""
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    space = Space(config, nodes, modes=(mode,))
    placements = list(space.placements())
    assert len(set(placements)) == len(placements) >= 3
    whole = {f"placement.{role}.{axis}": 1 for role in space.specs for axis in AXES}
    for placement in placements:
        roles = TrainingPlan(with_keys(config, space.joined(placement, [whole]))).derived.roles
        found = {role: roles[role].ranks for its, _ in placement.sets for role in its}
        assert found == {role: tuple(ranks) for its, ranks in placement.sets for role in its}
        assert found.keys() == space.specs.keys()
        assert mode == "sync" or all(0 not in ranks for ranks in found.values())


HOUR = Slice(length=3600.0, setup=300.0, save=60.0, reserve=300.0)  # 3000 s for steps


def test_forty_steps_in_slices_of_an_hour() -> None:
    """17 steps of 170 s, 17 more, and 6 of them after two whole hours: 7200 + 300 + 1020 + 60 s."""
    assert divide(40, 170.0, HOUR) == Division(slices=3, seconds=8580.0)
    assert divide(17, 170.0, HOUR) == Division(1, 300.0 + 17 * 170.0 + 60.0)
    assert divide(3, 1000.0, HOUR) == Division(1, 3360.0)  # the third ends where the reserve begins
    assert divide(1, 3001.0, HOUR) is None


def test_a_run_with_a_longer_step_takes_longer() -> None:
    drawn = random.Random(0)
    for _ in range(300):
        its = replace(HOUR, setup=drawn.uniform(0, 900), save=drawn.uniform(0, 300))
        count, (short, long) = drawn.randint(1, 200), sorted(drawn.uniform(5, 1000) for _ in range(2))
        first, second = divide(count, short, its), divide(count, long, its)
        assert first is not None and second is not None and first.seconds <= second.seconds


def test_the_best_number_of_nodes() -> None:
    """Twice the nodes, 0.6 of the step's time: 17, 29, 49 and 81 steps end within an hour."""
    step = {1: 170.0, 2: 102.0, 4: 61.2, 8: 36.72}

    def best(steps: int | None) -> int:
        return min(step, key=lambda nodes: order(nodes, steps, step[nodes], HOUR))

    assert [best(steps) for steps in (10, 17, 18, 40, 81)] == [1, 1, 2, 4, 8]
    assert best(500) == best(None) == 8  # the most steps
    assert min((4, 8), key=lambda nodes: order(nodes, 500, 900.0, HOUR)) == 4  # as many on either
    assert min((1, 2), key=lambda nodes: order(nodes, 5, 8000.0 / nodes, HOUR)) == 2  # none ends


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        (None, 300 + 40 * 170 + 300),
        (7400, 300 + 40 * 170 + 300),
        (3600, 300 + 14 * 170 + 300),  # three slices, of 14, 14 and 12 steps
        (769, None),
    ],
)
def test_the_shortest_wall_time(limit: float | None, seconds: float | None) -> None:
    found = shortest(40, 170.0, HOUR, limit)
    assert found == seconds
    if found is not None and limit is not None:
        division, at_limit = (divide(40, 170.0, replace(HOUR, length=length)) for length in (found, limit))
        assert division is not None and at_limit is not None and division.slices == at_limit.slices


def test_clock() -> None:
    assert [clock(seconds) for seconds in (1, 3600, 3601, 93784)] == ["00:01:00", "01:00:00", "01:01:00", "1-02:04:00"]
    assert clock(3570.0, 3590.0) == "00:59:50"  # at most the limit
    for seconds in (60, 86400, 123456):
        assert seconds_of(JobConfig(time=clock(seconds)).time) == 60 * math.ceil(seconds / 60)
