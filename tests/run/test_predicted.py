"""Predicted beside measured seconds: what is compared, when a line is logged, and the cause that it names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpcrl.config.schema import Config
from hpcrl.config.yaml_core import ConfigError
from hpcrl.controller.controller import Controller
from hpcrl.controller.register import Dispatch, Worker, register
from hpcrl.forecast.memory.memory import TrainingPlan
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.step import LOAD_METRIC, Prediction, Span, predict
from hpcrl.jobs.train import Train
from hpcrl.run.performance import STEPS, Slow
from hpcrl.run.predicted import (
    WARM_UP_STEPS,
    Compared,
    Evidence,
    PredictedSteps,
    Slowdowns,
    compared,
    left_out,
    likely_cause,
    methods_by_phase,
    on_ranks,
)
from tests.forecast.time.machines import cpu
from tests.run.small_run import MODEL

UPDATE, GENERATE = "actor.update_actor", "rollout.generate"
PROMPTS, RESPONSES = [12, 9, 16, 11] * 4, [8, 3, 5, 7] * 4


def prediction(**spans: tuple[float, float]) -> Prediction:
    ends = max(end for _, end in spans.values())
    timeline = tuple(Span(name, (0,), start, end) for name, (start, end) in spans.items())
    return Prediction(ends, {span.task: span.end - span.start for span in timeline}, {}, 1.0, timeline)


def config(**sections: dict[str, Any]) -> Config:
    data = {"train_files": ["none"], "train_batch_size": 8, "max_prompt_length": 16, "max_response_length": 8}
    template = {"model": MODEL, "data": data, "rollout": {"n": 2}, "algorithm": {"adv_estimator": "grpo"}}
    template["actor"] = {"ppo_mini_batch_size": 8, "ppo_max_token_len_per_gpu": 128}
    return Config.model_validate({**template, **sections})


def test_overlapping_phases_are_compared_together() -> None:
    """While rank 0 waits for the critic it may work in the actor, so that the critic's time has the actor's."""
    made = prediction(gen=(0.0, 4.0), update_critic=(4.0, 6.0), update_actor=(4.0, 7.0), update_weights=(7.0, 8.0))
    measured = {"gen": 4.0, "update_critic": 3.0, "update_actor": 0.1, "update_weights": 1.0}
    found = compared(made, measured, measured, fitted=measured)
    assert [(it.phases, it.measured, it.predicted) for it in found] == [
        (("gen",), 4.0, 4.0),
        (("update_critic", "update_actor"), 3.1, 3.0),
        (("update_weights",), 1.0, 1.0),
    ]
    assert not any(it.is_slow for it in found)


def test_ideal_times_are_compared_with_those_of_other_phases() -> None:
    made = prediction(gen=(0.0, 4.0), ref=(4.0, 6.0), update_actor=(6.0, 10.0), adv=(10.0, 10.001))
    measured = {"gen": 16.0, "ref": 4.0, "update_actor": 7.2, "adv": 0.1}
    ideal = {it.phases[0]: it for it in compared(made, measured, measured, fitted=())}
    assert ideal["gen"].expected == pytest.approx(4.0 * 1.9), "of 2 and 1.8; adv is too short to compare with"
    assert [name for name, it in ideal.items() if it.is_slow] == ["gen"]
    fitted = {it.phases[0]: it for it in compared(made, measured, measured, fitted=["gen", "ref"])}
    assert fitted["ref"].expected == 2.0 and fitted["ref"].is_slow
    fast = compared(made, {"gen": 2.0, "ref": 1.0}, ["gen", "ref"], fitted=())
    assert [it.expected for it in fast] == [4.0, 2.0], "never less than the ideal time"
    (only,) = compared(made, {"gen": 50.0}, ["gen"], fitted=())
    assert not only.is_slow, "nothing to compare with"


def test_a_phase_is_reported_once_after_ten_slow_steps_in_a_row() -> None:
    slow, usual = Compared(("gen",), 3.0, 1.0, 1.0), Compared(("gen",), 1.0, 1.0, 1.0)
    short = Compared(("adv",), 0.3, 0.1, 0.1)  # three times as long, and no half second more
    slowdowns, reported = Slowdowns(), []
    steps = [slow] * (STEPS - 1) + [usual] + [slow] * STEPS * 2
    for number, step in enumerate(steps, 1):
        reported += [(number, len(history)) for history in slowdowns.observe([step, short])]
    assert reported == [(2 * STEPS, STEPS)]


EVIDENCE = Evidence("update_actor", (UPDATE,), 10.0, {"products": 0.3, "communication": 0.6, "launches": 0.1}, {}, "m")
BUSY = {f"perf/busy_s/{UPDATE}/median": 9.0, f"perf/busy_s/{UPDATE}/max": 9.5}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"slow": [Slow(3, "n1", GENERATE), Slow(5, "n2", UPDATE)]}, "rank 5 on n2 is slower than its peers in it"),
        ({"slow": [Slow(3, "n1", GENERATE)]}, "60% of the prediction is communication; the links may be slower than m"),
        ({"swapped": 3 << 30, "slow": [Slow(3, "n1", GENERATE)]}, "3 GiB of rank 0's process are in swap"),
        ({"metrics": {f"memory/{UPDATE}/reserved_gb": 78.5}, "device_gib": 80.0}, "78.5 of a GPU's 80 GiB"),
        ({"metrics": {f"memory/{UPDATE}/reserved_gb": 70.0}, "device_gib": 80.0}, "60% of the prediction"),
        ({"metrics": {f"memory/{GENERATE}/reserved_gb": 79.0}, "device_gib": 80.0}, "60% of the prediction"),
        ({"metrics": {"train/num_gen_batches": 3.0}, "phase": "gen"}, "algorithm.filter_groups took 3 generations"),
        ({"metrics": {"tool_call_counts/max": 2.0}, "phase": "gen"}, "generation waits for tools"),
        ({"metrics": {"train/num_gen_batches": 3.0, "tool_call_counts/max": 2.0}}, "60% of the prediction"),
        (
            {"metrics": {**BUSY, f"perf/busy_s/{UPDATE}/median": 4.0}},
            "the busiest rank works 9.5 s, the median one 4 s",
        ),
        ({"phase": "reward"}, "it includes reward functions"),
        ({"metrics": {f"perf/busy_s/{UPDATE}/{it}": 2.0 for it in ("median", "max")}}, "works 2 of 10 s and waits"),
        ({"metrics": BUSY, "parts": {"products": 0.9, "launches": 0.1}}, "90% of the prediction is products; matrix"),
        (
            {"is_fitted": False},
            "says: `hpcrl check --job --machine FILE` measures it; the file has no efficiency of this",
        ),
        ({"parts": {}}, "the machine may be slower than m says: `hpcrl check --job --machine FILE` measures it"),
    ],
)
def test_the_likely_cause(changes: dict[str, Any], said: str) -> None:
    assert said in likely_cause(EVIDENCE._replace(**changes))


def plan(ranks: int = 2, **sections: dict[str, Any]) -> TrainingPlan:
    return TrainingPlan(on_ranks(config(**sections), ranks, ranks, False, 32))


def observe(steps: PredictedSteps, seconds: dict[str, float], number: int = 1) -> dict[str, float]:
    for _ in range(number):
        found = steps.observe({f"timing_s/{name}": it for name, it in seconds.items()}, PROMPTS, RESPONSES, {})
    return found


def test_a_slow_phase_of_a_job_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    machine = cpu(efficiency={"gen": 0.5, "update_actor": 0.5})
    steps = PredictedSteps(plan(), machine, {"gen": [GENERATE]})
    made = predict(plan(), machine, Lengths.of_samples(PROMPTS, RESPONSES))
    usual = {name: 1.2 * made.phases[name] for name in ("gen", "update_actor", "update_weights")}
    usual["step"] = sum(usual.values())
    found = observe(steps, usual, WARM_UP_STEPS + STEPS)
    assert found["perf/predicted_s/step"] == made.step
    assert found == {f"perf/predicted_s/{name}": {**made.phases, "step": made.step}[name] for name in usual}
    assert caplog.messages == []

    slow = {**usual, "gen": usual["gen"] + 2.0}
    observe(steps, slow, STEPS - 1)
    assert caplog.messages == []
    observe(steps, slow, 2 * STEPS)
    (line,) = caplog.messages
    assert line.startswith("gen takes 2") and "times its predicted time, for 10 steps; likely cause: " in line


def test_a_step_is_predicted_with_its_load_of_experts() -> None:
    """An expert-parallel rank with more tokens than others sends and receives more."""
    experts = {"family": "qwen3_moe", "num_experts": 4, "moe_ffn_hidden_size": 32}
    steps = PredictedSteps(plan(model=MODEL | experts, placement={"actor": {"ep": 2}}), cpu(), {})
    seconds = {"timing_s/update_actor": 1.0, "timing_s/step": 1.0}
    even, uneven, again = (
        steps.observe(seconds, PROMPTS, RESPONSES, {LOAD_METRIC: load})["perf/predicted_s/update_actor"]
        for load in (1.0, 2.0, 1.0)
    )
    assert uneven > even == again


def test_the_plan_is_of_the_ranks_that_run() -> None:
    there = on_ranks(config(job={"nodes": 64, "ntasks_per_node": 8, "gpus_per_node": 8}), 6, 4, False, 32)
    assert (there.job.nodes, there.job.ntasks_per_node, there.job.gpus_per_node) == (3, 2, 0)
    assert TrainingPlan(there).derived.world_size == 6 and TrainingPlan(there).models["actor"].shape.vocab_size == 32


def test_what_rank_0_only_waits_for_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    asynchronous = config(async_training={"mode": "one_step_off"})
    assert set(left_out(asynchronous)) == {"gen", "gen_max", "judge", "reward", "save_checkpoint"}
    assert left_out(config()) == ("save_checkpoint",)
    assert {"gen", "step"} < set(left_out(config(trainer={"rollouts_from": "run/rollouts"})))
    steps = PredictedSteps(plan(trainer={"rollouts_from": "run/rollouts"}), cpu(), {})
    assert observe(steps, {"gen": 1.0, "update_actor": 1.0, "step": 2.0}).keys() == {"perf/predicted_s/update_actor"}


def test_a_job_that_cannot_be_predicted_continues(caplog: pytest.LogCaptureFixture) -> None:
    steps = PredictedSteps(plan(ranks=3, placement={"actor": {"tp": 2}}), cpu(), {})
    assert observe(steps, {"gen": 1.0, "step": 1.0}, 3) == {}
    (line,) = caplog.messages
    assert line.startswith("steps are not predicted: ConfigError: ") and "tp" in line


def test_methods_have_the_phases_that_wait_for_them() -> None:
    class Rollout(Worker):
        @register(Dispatch.DP_COMPUTE_PROTO)
        def generate(self) -> None: ...

    class Actor(Worker):
        @register(Dispatch.DP_COMPUTE_PROTO, phase="old_log_prob")
        def compute_log_prob(self) -> None: ...

        @register(Dispatch.DP_COMPUTE_METRIC)
        def update_actor(self) -> None: ...

    workers = {"actor": Actor, "rollout": Rollout}
    controller = SimpleNamespace(groups={role: SimpleNamespace(worker=worker) for role, worker in workers.items()})
    found = methods_by_phase(cast(Controller, controller))
    assert found["gen"] == [GENERATE] and found["update_actor"] == [UPDATE]
    assert found["old_log_prob"] == ["actor.compute_log_prob"]


def test_the_machine_is_read_before_a_job_is_built() -> None:
    with pytest.raises(ConfigError, match="no machine dgx_h10: .*; did you mean dgx_h100?"):
        Train.prepare(config(job={"machine": "dgx_h10"}))
