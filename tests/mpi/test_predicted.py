"""`job.machine`: the steps of a short job are predicted from the lengths that they had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hpcrl.forecast.memory.memory import TrainingPlan
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.step import predict
from hpcrl.jobs.train import Train
from hpcrl.machine.machine_file import read_machine
from hpcrl.observe.read.archive import read_samples
from hpcrl.observe.record.archive import step_path
from hpcrl.run.predicted import on_ranks
from tests.forecast.time.machines import CPU
from tests.mpi.lab import Lab, run_job
from tests.mpi.test_async import GRPO

COMPARED = {"gen", "old_log_prob", "ref", "adv", "update_actor", "update_weights", "dump_rollout_generations", "step"}


def lines(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.ci_world(2)
@pytest.mark.world(2)
def test_a_job_logs_what_is_predicted_of_its_lengths(world, lab: Lab) -> None:
    path = lab.folder / "mine.yaml"
    if world.rank == 0:
        path.write_text(yaml.safe_dump({**CPU, "efficiency": {"gen": 0.5}}))
    world.barrier()
    other_ranks = {"machine": str(path), "nodes": 3, "ntasks_per_node": 8}
    options = {"job": other_ranks, "algorithm": GRPO, "trainer": {"total_training_steps": 2}}
    template = lab.config("predicted", {}, options)
    assert run_job(world, "train", Train.prepare(Train.schema().model_validate(template))) == 0
    run = lab.folder / "predicted"
    if world.rank != 0:
        return

    config = Train.read_config(str(run / "config.yaml"))
    plan = TrainingPlan(on_ranks(config, 2, 2, False, 60))
    assert plan.derived.world_size == 2
    for step, line in enumerate(lines(run), 1):
        samples = read_samples(step_path(run / "rollouts", step), ("prompt_length", "response_length"))
        lengths = Lengths.of_samples(*(samples[f"{part}_length"].tolist() for part in ("prompt", "response")))
        made = predict(plan, read_machine(str(path)), lengths)
        logged = {name.rpartition("/")[2]: it for name, it in line.items() if name.startswith("perf/predicted_s/")}
        assert logged.keys() == COMPARED and all(f"timing_s/{name}" in line for name in logged)
        assert logged == {name: {**made.phases, "step": made.step}[name] for name in logged}
    assert len({line["perf/predicted_s/gen"] for line in lines(run)}) == 2, "by the lengths of each step"
