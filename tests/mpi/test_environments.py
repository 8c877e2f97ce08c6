"""Whole jobs with an environment: rewards of turns reach the advantages, failed samples count nowhere, jobs resume bit
for bit."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from hpcrl.batch.ragged import Ragged
from hpcrl.observe.read.archive import read_step
from hpcrl.observe.read.samples import read_step_samples
from hpcrl.observe.record.archive import step_path
from tests.mpi.lab import Lab, interrupted, metrics, on, reused
from tests.mpi.test_generate import Inference

pytestmark = pytest.mark.ci_world(2)

COMPARED = "critic/score/mean", "critic/advantages/max", "actor/grad_norm"
NAMES = "response_mask", "token_level_scores", "advantages"
# Random weights end few turns: here every turn may be cut, and is answered. The third one begins a new conversation.
ENVIRONMENT = """
from hpcrl.api import Environment, Step

class Echo(Environment):
    def reset(self, record, seed):
        self.seed, self.turns = seed, 0
        return []

    def step(self, turn):
        self.turns += 1
        if self.seed % 5 == 0 and len(turn.text) % 2:
            raise ValueError("a bad move")
        reward = sum(map(ord, turn.text)) % 7 / 7
        done = turn.is_last or self.turns == 3
        info = {"acc": reward, "turns": self.turns}
        return Step([{"role": "user", "content": "1"}], done, reward, info, new_conversation=self.turns == 2)
"""


def sections(lab: Lab, estimator: str) -> dict[str, Any]:
    environment = {"path": str(lab.folder / "e.py"), "name": "Echo"}
    return {
        # The times at which answers arrive vary, and exact log-probs do not depend on what is computed with them.
        "rollout": {"exact": True, "multi_turn": {"enable": True, "environment": environment}},
        "data": {"max_response_length": 24},
        "algorithm": {"adv_estimator": estimator, "use_kl_in_reward": False},
        "reward": {"custom_reward_function": {"path": None}},
    }


@pytest.mark.parametrize(
    "estimator", ["gigpo", *(pytest.param(it, marks=pytest.mark.exhaustive) for it in ("grpo", "gae"))]
)
def test_a_job_with_an_environment(world: Any, lab: Lab, straight: Any, estimator: str) -> None:
    if world.rank == 0:
        (lab.folder / "e.py").write_text(ENVIRONMENT)
    world.barrier()
    placement, keys = on(world, tp=min(2, world.size)), sections(lab, estimator)
    trainer = {"total_training_steps": 2, "save_freq": 1}
    whole = straight(f"acts_{estimator}", placement, **keys, trainer=trainer)
    found = metrics(whole)
    assert all(line["env/steps"] > 24 and line["env/errors"] > 0 for line in found.values())
    for line in found.values():  # a conversation's positions and cache are those of its sequence in training
        assert line["training/num_sequences/max"] == 2 and line["training/rollout_probs_diff_max"] == 0
    for step in found:
        tokens, samples, _ = read_step(step_path(whole / "rollouts", step), [*NAMES])
        check_samples({name: Ragged(*tokens[name]) for name in NAMES}, samples)
    shown = [one.parts for one in read_step_samples(whole, 2) if "turn_rewards" in one.parts]
    assert shown and all(len(parts["turn_rewards"].split()) == parts["turns"] for parts in shown)

    name = f"cut_{estimator}"
    drawn = interrupted(world, lab, whole, name, saved=1, drawn=2, keep=0.5)
    resumed = lab.run(name, placement, **keys, trainer=trainer)
    assert 0 < reused(resumed, 2) == drawn
    for step, line in metrics(resumed).items():
        names = [name for name in line if not name.startswith("env/")]  # environments are not asked again
        assert {name: line[name] for name in names} == {name: found[step].get(name) for name in names}

    # Rewards and states of turns are in the archive.
    replay = {"total_training_steps": 1, "rollouts_from": str(whole / "rollouts")}
    replayed = metrics(lab.run(f"replayed_{estimator}", placement, **keys, trainer=replay))[1]
    assert {name: replayed[name] for name in COMPARED} == {name: found[1][name] for name in COMPARED}


def check_samples(tokens: dict[str, Ragged], samples: dict[str, np.ndarray]) -> None:
    failed = 0
    for index, reason in enumerate(samples["finish_reason"].tolist()):
        mask, scores, advantages = (tokens[name].row(index) for name in NAMES)
        said = json.loads(samples["extras"][index])
        if reason == "error":
            failed += 1
            assert not mask.any() and not scores.any() and not (mask * advantages).any()
            assert np.isnan(samples["acc"][index])
        else:
            ends = np.flatnonzero(np.diff([*mask, 0]) == -1)  # of turns
            assert set(np.flatnonzero(scores)) <= set(ends) and len(ends) == said["turns"]
            assert samples["score"][index] == pytest.approx(scores.sum(), abs=1e-6)
            assert samples["acc"][index] == pytest.approx(scores[ends[-1]], abs=1e-6)
    assert 0 < failed < len(samples["finish_reason"])


SAYS = """
from hpcrl.api import Environment, Step

class Says(Environment):
    def reset(self, record, seed):
        return [{"role": "user", "content": "1+2=3"}]

    def step(self, turn):
        return Step(done=True)
"""


def test_dumps_have_the_prompt_that_the_model_read(world: Any, lab: Lab) -> None:
    """In lines of `hpcrl generate` and of a validation."""
    if world.rank == 0:
        (lab.folder / "says.py").write_text(SAYS)
    world.barrier()
    keys = sections(lab, "grpo")
    keys["rollout"] |= {"n": 1, "multi_turn": {"enable": True, "environment": {"path": str(lab.folder / "says.py")}}}
    keys["rollout"]["multi_turn"]["environment"]["name"] = "Says"
    trainer = {"validation_data_dir": "dumps"}
    made = Inference(lab)
    keys["data"] |= {"max_prompt_length": 64, **made.data, "val_max_samples": 4}
    lines = made.generate("says", on(world), **keys)
    made.evaluate("says_too", on(world), **keys, trainer=trainer)
    (dump,) = (lab.folder / "says_too").rglob("dumps/*.jsonl")
    shown = [json.loads(line)["input"] for line in dump.read_text().splitlines()]
    assert len(lines) == len(shown) == 4
    for line, text in zip(lines, shown, strict=True):
        assert line["prompt"] == text and "1+2=3" in text
        assert len(line["prompt_ids"]) >= 5


HALF = """
from pathlib import Path
from hpcrl.api import Environment, Step

try:  # each leader of a replica imports the file
    Path(__file__).with_name("taken").touch(exist_ok=False)
    FAILS = True
except FileExistsError:
    FAILS = False

class Half(Environment):
    def reset(self, record, seed):
        if FAILS:
            raise OSError("nothing here")
        return []

    def step(self, turn):
        return Step(done=True, reward=sum(map(ord, turn.text)) % 7 / 7)
"""


@pytest.mark.world(2)
def test_experts_are_replayed_where_all_environments_of_a_replica_failed(world: Any, lab: Lab) -> None:
    if world.rank == 0:
        (lab.folder / "half.py").write_text(HALF)
    world.barrier()
    keys = sections(lab, "grpo")
    keys["rollout"]["multi_turn"]["environment"] = {"path": str(lab.folder / "half.py"), "name": "Half"}
    experts = {"family": "qwen3_moe", "num_experts": 4, "moe_ffn_hidden_size": 32}
    keys |= {"model": experts, "actor": {"router_replay": {"mode": "R3"}}}
    run = lab.run("half", on(world, ep=2), **keys, trainer={"total_training_steps": 1})
    assert metrics(run)[1]["env/errors"] == 12
    tokens, samples, _ = read_step(step_path(run / "rollouts", 1))
    lengths = samples["prompt_length"] + samples["response_length"]
    assert np.array_equal(np.diff(tokens["routed_experts"][1]), lengths * 2 * 2)
    shown = read_step_samples(run, 1)
    failed = [one.parts["error"] for one in shown if one.finish_reason == "error"]
    assert failed == ["errors: OSError: nothing here (half.py:14)"] * 12
