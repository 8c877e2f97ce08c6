"""Predictions of whole jobs: monotone, above their bound, and of the same sizes as `hpcrl plan`."""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.loader import load_config
from hpcrl.config.schema import Config
from hpcrl.config.yaml_core import ConfigError
from hpcrl.forecast.memory.memory import TrainingPlan, with_keys
from hpcrl.forecast.memory.state import checkpoint_bytes
from hpcrl.forecast.time.cost import refit_shares
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.phases import JobTimes
from hpcrl.forecast.time.step import Prediction, predict
from hpcrl.forecast.time.table import lines_of
from hpcrl.machine.machine_file import UNKNOWN_SPREAD, Machine
from tests.forecast.time.machines import cpu, gpu

CONFIGS = Path(__file__).parents[3] / "configs"
MODEL = {"model.vocab_size": 128, "model.tokenizer": None}  # the countdown templates' tokenizer takes long to load


@cache
def template(name: str) -> Config:
    return load_config(str(CONFIGS / f"{name}.yaml"))


def job_of(name: str, **changes: Any) -> TrainingPlan:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    return TrainingPlan(with_keys(template(name), {**(MODEL if "countdown" in name else {}), **keys}))


def machine_of(job: TrainingPlan, **changes: Any) -> Machine:
    return (gpu if job.on_gpu else cpu)(**changes)


def lengths_of(job: TrainingPlan, sigma: float = 0.8, mean: float | None = None) -> Lengths:
    data = job.config.data
    longest = data.max_response_length
    return Lengths.log_normal(data.max_prompt_length, mean or longest / 2, sigma, longest)


def predicted(job: TrainingPlan, **changes: Any) -> Prediction:
    return predict(job, machine_of(job, **changes), lengths_of(job))


NAMES = ["ppo_70b", "grpo_8b", "grpo_0_5b", "grpo_countdown_cpu", "ppo_countdown_cpu", "judge_countdown_cpu"]
OVERLAPPING = ["one_step_off_countdown_cpu", "async_countdown_cpu"]


@pytest.mark.parametrize("name", NAMES + OVERLAPPING)
def test_templates(name: str) -> None:
    job = job_of(name)
    found = predicted(job)
    named = {phase.name for phase in job.phases if phase.kind in ("forward", "train")}
    assert set(found.phases) >= {"gen", "adv", "update_weights", *named}
    for phase, parts in found.parts.items():
        assert not parts or sum(parts.values()) == pytest.approx(1.0), phase
    assert found.tokens_per_second * found.seconds == pytest.approx(job.derived.samples_per_step * lengths_of(job).mean)
    if name in OVERLAPPING:
        assert max(found.phases.values()) <= found.step * (1 + 1e-9) < sum(found.phases.values())
    else:
        assert found.seconds == pytest.approx(sum(found.phases.values()))
        assert max(span.end for span in found.spans) == pytest.approx(found.step)


@pytest.mark.parametrize("name", ["ppo_70b", "grpo_8b", "one_step_off_countdown_cpu"])
def test_a_better_machine_is_faster(name: str) -> None:
    job = job_of(name)
    usual = predicted(job).seconds
    links = machine_of(job).links
    better: list[dict[str, Any]] = [
        {"device__memory_bandwidth": 1e13},
        {"device__launch": 1e-7},
        {"node__host_copy": 1e12},
        {"links__inside": {"latency": links.inside.latency, "bandwidth": 1e12}},
        {"links__between": {"latency": links.between.latency, "bandwidth": 1e12}, "node__network": None},
        {"links__inside": {"latency": 0.0, "bandwidth": links.inside.bandwidth}},
    ]
    assert all(predicted(job, **changes).seconds <= usual for changes in better)
    assert predicted(job, device__memory_bandwidth=1e13).seconds < usual


def test_longer_responses_take_longer() -> None:
    job = job_of("grpo_8b")
    took = [predict(job, gpu(), Lengths.fixed(512, tokens)).seconds for tokens in range(64, 1025, 96)]
    assert took == sorted(took)
    same_mean = [Lengths.log_normal(512, 200, sigma, 100_000) for sigma in (0.0, 1.0)]
    tails = [predict(job, gpu(), lengths).phases["gen"] for lengths in same_mean]
    assert tails[1] > tails[0]


def test_efficiency_divides_the_time_of_a_phase() -> None:
    job = job_of("grpo_8b")
    before, after = predicted(job), predicted(job, efficiency={"gen": 0.5})
    usual, slow = before.phases, after.phases
    communication = usual["gen"] * before.parts["gen"]["communication"]
    assert slow["gen"] - communication == pytest.approx(2 * (usual["gen"] - communication))
    assert slow["update_actor"] == pytest.approx(usual["update_actor"])


def test_the_band_is_that_of_the_phases() -> None:
    job = job_of("grpo_8b")
    spread = {"gen": 0.1, "update_actor": 0.3}
    machine = machine_of(job, spread=spread)
    found = predict(job, machine, lengths_of(job))
    total = sum(found.phases.values())
    parts = (spread.get(name, UNKNOWN_SPREAD) * seconds / total for name, seconds in found.phases.items())
    assert found.spread(machine) == pytest.approx(sum(parts))
    low, high = found.band(machine)
    assert high / found.seconds == pytest.approx(found.seconds / low) == pytest.approx(1 + found.spread(machine))


def test_ranks_share_the_cores_of_a_node() -> None:
    """Four ranks on two cores take twice as long; apart, generation is hidden only if there are cores for it."""
    job = job_of("grpo_countdown_cpu")
    shared, own = predicted(job), predicted(job, node__cores=4.0)
    assert shared.step == pytest.approx(2 * own.step)
    assert shared.parts["gen"]["waiting"] == pytest.approx(0.5)
    for name in OVERLAPPING:
        job = job_of(name)
        crowded, apart = predicted(job, node__cores=1.0), predicted(job, node__cores=4.0)
        assert apart.step < crowded.step


def test_overlapping_modes_hide_generation() -> None:
    took = {}
    for mode in ("sync", "one_step_off", "bounded_staleness"):
        job = job_of("async_countdown_cpu", async_training__mode=mode)
        took[mode] = predict(job, cpu(node__cores=4.0), lengths_of(job, 1.0))
    apart = took["sync"]
    assert took["one_step_off"].step < apart.step
    assert took["one_step_off"].step >= max(apart.phases["gen"], apart.phases["update_actor"])
    assert took["bounded_staleness"].step <= took["one_step_off"].step * 1.01


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("grpo_8b", {}),
        ("grpo_8b", {"placement__actor__tp": 2, "placement__rollout__tp": 4}),
        ("grpo_8b", {"placement__actor__tp": 2, "placement__actor__pp": 4}),
        ("one_step_off_countdown_cpu", {}),
    ],
)
def test_a_refit_moves_what_the_planner_moves(name: str, changes: dict[str, Any]) -> None:
    job = job_of(name, **changes)
    times = JobTimes(job, machine_of(job), lengths_of(job))
    source, destination = job.layouts["actor"], job.layouts["rollout"]
    shares = refit_shares(source, destination, times.stage_shares(), times.ranks_per_node)
    traffic = job.refit.traffic().values()
    whole = times.engine_bytes
    received = max(share.near + share.far for share in shares) * whole
    assert received == pytest.approx(max(it.received for it in traffic), rel=0.05)
    assert max(it.copied for it in shares) * whole == pytest.approx(max(it.copied for it in traffic), rel=0.05)
    sent = sum(it.sent for it in traffic) / source.size
    assert max(it.sent for it in shares) * whole == pytest.approx(sent, rel=0.05)
    cross = job.refit.cross_node_bytes()
    assert (max(it.far for it in shares) > 0) == (cross > 0)


@pytest.mark.parametrize("name", ["grpo_8b", "grpo_0_5b", "ppo_countdown_cpu"])
def test_sizes_are_those_of_the_plan(name: str) -> None:
    job = job_of(name)
    times = JobTimes(job, machine_of(job), lengths_of(job))
    for role, model in job.models.items():
        held = [it.all * model.itemsize for it in times.pass_model(role).numbers]
        planned = [job.states[role, stage].parameters for stage in range(model.layout.pp)]
        assert held == pytest.approx(planned, rel=0.01)
    cache = min(row.kv_cache for row in job.rows() if row.phase == "rollout")
    assert times._kv_cache() == pytest.approx(cache, rel=0.01)
    saved = checkpoint_bytes(job.config, job.models)
    assert times.checkpoint_bytes() == pytest.approx({role: saved[role] for role in times.checkpoint_bytes()}, rel=0.01)


def test_table() -> None:
    job = job_of("grpo_countdown_cpu")

    def lines(**options: Any) -> list[str]:
        return lines_of(
            job, argparse.Namespace(**{"machine": None, "response_lengths": None, "timeline": [], **options})
        )

    assert lines() == []
    with pytest.raises(ConfigError, match="name a machine"):
        lines(response_lengths="8,1")
    with pytest.raises(ConfigError, match="did you mean|expected a YAML file"):
        lines(machine="no_such")
    job = job_of("grpo_countdown_cpu", job__machine="dgx_h10")
    with pytest.raises(ConfigError, match="did you mean dgx_h100"):
        lines()
    assert any("step on dgx_a100" in line for line in lines(machine="dgx_a100"))


def test_table_of_a_machine_file(tmp_path: Path) -> None:
    job, path = job_of("grpo_countdown_cpu"), tmp_path / "mine.yaml"
    path.write_text(cpu().model_dump_json(), encoding="utf-8")
    options = argparse.Namespace(machine=str(path), response_lengths="8,0.5", timeline=[])
    text = "\n".join(lines_of(job, options))
    assert "step on cpu" in text
    assert all(phase in text for phase in ("gen", "update_actor", "limited by", "tokens/s per rank", "node-hours"))
    low, high = predict(job, cpu(), lengths_of(job, 0.5, 8)).band(cpu())
    assert f"{low:.4g} to {high:.4g}" in text
    assert "an extrapolation: the figures of cpu are published ones" in text
    path.write_text(cpu(measured=True).model_dump_json(), encoding="utf-8")
    assert "extrapolation" not in "\n".join(lines_of(job, options))
    for wrong in ("8", "0,1", "8,-1", "a,b"):
        options.response_lengths = wrong
        with pytest.raises(ConfigError, match="MEAN,SIGMA"):
            lines_of(job, options)
