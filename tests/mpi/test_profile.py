"""`trainer.profile_steps`: each rank's trace of a step, whose ranges are named for methods and micro-batches."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.mpi.lab import Lab, metrics, on
from tests.mpi.test_async import APART, GRPO


class Range(NamedTuple):
    start: float  # microseconds
    end: float

    def holds(self, other: Range) -> bool:
        return self.start <= other.start and other.end <= self.end


def trace_of(run: Path, step: int, rank: int) -> Path:
    return run / "profile" / f"step_{step:08d}_rank_{rank:05d}.json.gz"


def ranges(trace: Path) -> dict[str, list[Range]]:
    """The named ranges of a trace, in the order of their start."""
    found = defaultdict(list)
    for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]:
        if event.get("cat") == "user_annotation":
            found[event["name"]].append(Range(event["ts"], event["ts"] + event["dur"]))
    return {name: sorted(each) for name, each in found.items()}


@pytest.mark.ci_world(2)
@pytest.mark.world(2)
def test_profiled_steps_have_a_trace_per_rank_and_the_numbers_of_others(world, lab: Lab, caplog) -> None:
    sections = {"algorithm": GRPO, "actor": {"ppo_max_token_len_per_gpu": 64}}
    plain = lab.run("plain", on(2, pp=2), trainer={"total_training_steps": 2}, **sections)
    options = {"profile_steps": [1, 2], "save_freq": 1}
    lab.run("profiled", on(2, pp=2), trainer={"total_training_steps": 1, **options}, **sections)
    if world.rank == 0:
        trace_of(lab.folder / "profiled", 2, rank=1).mkdir()  # rank 1 cannot write there
    with caplog.at_level("INFO"):
        profiled = lab.run("profiled", on(2, pp=2), trainer={"total_training_steps": 2, **options}, **sections)
    assert metrics(profiled) == metrics(plain)

    written = [trace_of(profiled, 1, rank=0), trace_of(profiled, 1, rank=1), trace_of(profiled, 2, rank=0)]
    assert sorted(path for path in (profiled / "profile").iterdir() if path.is_file()) == sorted(written)
    for path in written:
        found = ranges(path)
        transfer = "forward-recv" if path.name.endswith("rank_00001.json.gz") else "backward-recv"
        assert {"actor.compute_log_prob", "refit.update_weights", "checksums", transfer} <= found.keys()
        (update,) = found["actor.update_actor"]
        forward, backward, optimizer = (
            [each for each in found[name] if update.holds(each)]
            for name in ("forward-compute", "backward-compute", "optimizer")
        )
        assert len(optimizer) == 2 and len(forward) == len(backward) > 4  # two updates of several micro-batches
        (generate,) = found["rollout.generate"]
        assert all(generate.holds(each) for each in (*found["prefill"], *found["decode"]))
    assert "controller.step" in ranges(written[0])
    if world.rank == 0:
        lines = [record.getMessage() for record in caplog.records if record.name == "hpcrl.run.performance"]
        told, warned = lines
        assert told == f"profile of step 2: {profiled / 'profile' / 'step_00000002'}_rank_*.json.gz"
        assert warned.startswith("1 of the traces of step 2 could not be written") and "rank 1: " in warned


@pytest.mark.ci_world(2)
@pytest.mark.world(2)
def test_sft_and_reward_models_are_profiled_too(world, lab: Lab) -> None:
    sft = lab.run_sft(
        "profiled_sft",
        sft={"batch_size": 8, "total_training_steps": 1},
        trainer={"profile_steps": [1]},
    )
    rm = lab.run_rm("profiled_rm", rm={"batch_size": 8, "total_training_steps": 1}, trainer={"profile_steps": [1]})
    for rank in range(2):
        assert {"data.load", "actor.update", "backward-compute"} <= ranges(trace_of(sft, 1, rank)).keys()
        assert {"data.load", "reward.update", "backward-compute"} <= ranges(trace_of(rm, 1, rank)).keys()


@pytest.mark.slow
@pytest.mark.world(4)
@pytest.mark.parametrize("mode", ["one_step_off", "bounded_staleness"])
def test_ranks_that_are_generating_are_profiled_too(world, lab: Lab, mode: str) -> None:
    """The ranks of one replica begin and end a trace at different moments: its leader inside a running method."""
    placement = {**APART, "rollout": {"pool": "generate", "tp": 2}}
    options = {"total_training_steps": 3, "profile_steps": [2]}
    run = lab.run(f"profiled_{mode}", placement, async_training={"mode": mode}, algorithm=GRPO, trainer=options)
    for rank in range(4):
        found = ranges(trace_of(run, 2, rank))
        expected = {0: "controller.step", 1: "actor.update_actor", 2: "decode", 3: "refit.update_weights"}[rank]
        assert expected in found, sorted(found)
