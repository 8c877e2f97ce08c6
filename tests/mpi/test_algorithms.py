"""Algorithms as parts of `hpcrl train`: what the loop adds to the pure functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.algorithms import advantage
from hpcrl.observe.read.archive import read_step
from hpcrl.observe.record.archive import step_path
from tests.mpi.lab import Lab, metrics, on, own_layout

pytestmark = pytest.mark.ci_world(2)

# Samples of a prompt seldom score alike; `coarse` does in half of the groups of two.
SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    total = sum(map(ord, solution_str))
    return {"score": total % 7 / 7, "coarse": float(total % 2), "fine": total % 5 / 5}
"""
PLAIN = {"actor": {"use_kl_loss": False, "entropy_coeff": 0.0}, "algorithm": {"use_kl_in_reward": False}}


@pytest.fixture(scope="module")
def parts(world, lab: Lab) -> dict[str, Any]:
    """A `reward` section whose scorer returns parts."""
    path = lab.folder / "parts.py"
    if world.rank == 0:
        path.write_text(SCORE)
    world.barrier()
    return {"custom_reward_function": {"path": str(path)}}


def padded(column: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    values, offsets = column
    rows = np.split(values, offsets[1:-1])
    found = np.zeros((len(rows), max(map(len, rows))), values.dtype)
    for place, row in zip(found, rows, strict=True):
        place[: len(row)] = row
    return found


def without(base: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    """PLAIN with more."""
    merged = {name: dict(values) for name, values in base.items()}
    for name, values in sections.items():
        merged[name] = {**merged.get(name, {}), **values}
    return merged


def dynamic(parts: dict[str, Any], **trainer: Any) -> dict[str, Any]:
    filtering = {"enable": True, "metric": "coarse", "max_num_gen_batches": 20}
    algorithm = {"adv_estimator": "grpo", "filter_groups": filtering}
    return without(PLAIN, algorithm=algorithm, reward=parts, trainer=trainer, data={"gen_batch_size": 7})


@pytest.mark.slow
def test_dynamic_sampling_fills_every_step_and_resumes_with_its_surplus(world, lab: Lab, parts) -> None:
    """Prompts without spread are replaced, none is used twice, and a resumed run is the uninterrupted one."""
    straight = lab.run("dynamic", own_layout(world.size), **dynamic(parts, total_training_steps=4))
    seen: list[str] = []
    surplus = []
    for step, line in metrics(straight).items():
        _, samples, _ = read_step(step_path(straight / "rollouts", step))
        prompts = samples["prompt"]
        assert sorted(set(prompts.tolist())) == list(range(12))
        for prompt in range(12):
            uids = set(samples["uid"][prompts == prompt].tolist())
            assert len(uids) == 1
            seen += uids
        assert line["training/filter_groups/evicted_samples"] > 0
        assert line["train/num_gen_batches"] >= 2
        surplus.append(line["training/filter_groups/surplus_samples"])
    assert len(seen) == len(set(seen))
    assert max(surplus) > 0

    for total in (2, 4):
        resumed = lab.run(
            "dynamic_halted", own_layout(world.size), **dynamic(parts, total_training_steps=total, save_freq=2)
        )
    assert metrics(resumed) == metrics(straight)


@pytest.mark.world(2)
def test_dynamic_sampling_draws_the_same_prompts_on_another_layout(world, lab: Lab, parts) -> None:
    uids = []
    for name, sizes in {"dynamic_tp": {"tp": 2}, "dynamic_dp": {}}.items():
        run = lab.run(name, on(2, **sizes), **dynamic(parts, total_training_steps=1))
        uids.append(read_step(step_path(run / "rollouts", 1))[1]["uid"].tolist())
    assert uids[0] == uids[1]


def test_remax_subtracts_the_greedy_score(world, lab: Lab) -> None:
    run = lab.run(
        "remax", own_layout(world.size), **without(PLAIN, algorithm={"adv_estimator": "remax"}, rollout={"n": 1})
    )
    tokens, samples, _ = read_step(step_path(run / "rollouts", 1))
    mask = padded(tokens["response_mask"])
    expected = (samples["score"] - samples["reward_baseline"])[:, None] * mask
    np.testing.assert_allclose(padded(tokens["advantages"]), expected, atol=1e-6)
    greedy = lab.run(
        "greedy",
        own_layout(world.size),
        **without(PLAIN, algorithm={"adv_estimator": "remax"}, rollout={"n": 1, "temperature": 1e-4}),
    )
    _, cold, _ = read_step(step_path(greedy / "rollouts", 1))
    assert cold["uid"].tolist() == samples["uid"].tolist()
    assert np.mean(cold["score"] == samples["reward_baseline"]) >= 0.9  # all but ties


@pytest.mark.slow
def test_pf_ppo_trains_on_samples_drawn_by_their_scores(world, lab: Lab) -> None:
    """Without learning, what the update sees shows in the mean of its old advantages."""
    options = without(PLAIN, algorithm={"adv_estimator": "gae", "use_pf_ppo": True, "lam": 1.0})
    run = lab.run("pf_ppo", own_layout(world.size), **options)
    plain = lab.run("no_pf_ppo", own_layout(world.size), **without(PLAIN, algorithm={"lam": 1.0}))
    found, expected = metrics(run)[1], metrics(plain)[1]
    assert found["critic/score/mean"] == expected["critic/score/mean"]  # the rollout is the same
    assert found["actor/pg_loss"] < expected["actor/pg_loss"]  # better samples: a larger mean advantage


def test_gdpo_reads_the_parts_of_the_reward(world, lab: Lab, parts) -> None:
    keys = {"gdpo_reward_keys": ["coarse", "fine"], "gdpo_reward_weights": [1.0, 0.5]}
    options = without(PLAIN, algorithm={"adv_estimator": "gdpo", **keys}, reward=parts, rollout={"n": 4})
    run = lab.run("gdpo", own_layout(world.size), **options)
    tokens, samples, _ = read_step(step_path(run / "rollouts", 1))
    extras = [json.loads(text) for text in samples["extras"]]
    expected, _ = advantage(
        "gdpo",
        config=keys,
        token_level_rewards=torch.from_numpy(padded(tokens["token_level_rewards"])),
        response_mask=torch.from_numpy(padded(tokens["response_mask"])),
        index=samples["prompt"],
        reward_components={key: torch.tensor([row[key] for row in extras]) for key in ("coarse", "fine")},
    )
    np.testing.assert_allclose(padded(tokens["advantages"]), expected.numpy(), atol=1e-5)


def test_token_baselines_have_what_they_need(world, lab: Lab) -> None:
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        run = lab.run(name, own_layout(world.size), **without(PLAIN, algorithm={"adv_estimator": name}))
        line = metrics(run)[2]
        assert line["actor/grad_norm"] > 0
        assert line["variance_proxy/proxy2_total_power"] > 0


@pytest.mark.slow
def test_rollout_correction_in_both_modes(world, lab: Lab) -> None:
    """Engines agree, so weights are 1 and nothing is rejected by wide bounds; by narrow ones everything is."""
    wide = {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
    runs = {
        "plain": {},
        "corrected": wide,
        "rejected": {"rollout_rs": "token_k1", "rollout_rs_threshold": "1.5_2.0"},
        "bypass": {"preset": "bypass_ppo_clip"},
        "reinforce": {"preset": "bypass_pg_is"},
    }
    found = {}
    for name, correction in runs.items():
        algorithm = {"adv_estimator": "grpo", "rollout_correction": correction}
        run = lab.run(f"correction_{name}", own_layout(world.size), **without(PLAIN, algorithm=algorithm))
        found[name] = metrics(run)[1]
    for name in ("corrected", "bypass"):
        assert found[name]["actor/grad_norm"] == pytest.approx(found["plain"]["actor/grad_norm"], rel=1e-3), name
    assert found["corrected"]["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-4)
    assert found["rejected"]["rollout_corr/rollout_rs_masked_fraction"] == 1.0
    assert found["rejected"]["actor/grad_norm"] == 0.0
    assert found["reinforce"]["actor/grad_norm"] > 0
    assert "actor/entropy" not in found["bypass"]  # there was no forward pass before the update


def distilled(folder: Path, **loss: Any) -> dict[str, Any]:
    return without(
        PLAIN,
        model={"init_from": str(folder)},
        algorithm={"adv_estimator": "grpo"},
        distillation={"enabled": True, "distillation_loss": {"use_task_rewards": False, **loss}},
    )


@pytest.mark.slow
def test_a_student_comes_closer_to_its_teacher(world, lab: Lab) -> None:
    """A student that is its own teacher has nothing to learn; another one learns, by either kind of loss."""
    placement = {**own_layout(world.size), "teacher": {"tp": 2} if world.size > 1 else {}}
    start = lab.run("student", placement, **PLAIN, trainer={"save_freq": 2, "total_training_steps": 2})
    teacher = lab.run(
        "teacher",
        placement,
        **without(PLAIN, actor={"optim": {"lr": 4e-3}}),
        trainer={"save_freq": 4, "total_training_steps": 4},
    )
    for mode in ({"loss_mode": "k3"}, {"loss_mode": "forward_kl_topk", "topk": 4}):
        name = mode["loss_mode"]
        one_update = without(distilled(start, **mode), actor={"ppo_mini_batch_size": 12})
        same = lab.run(f"same_{name}", placement, **one_update, trainer={"total_training_steps": 1})
        assert metrics(same)[1]["distillation/loss"] < 1e-6
        run = lab.run(
            f"distil_{name}",
            placement,
            **distilled(start, **mode),
            teacher={"init_from": str(teacher)},
            trainer={"total_training_steps": 8},
        )
        losses = [line["distillation/loss"] for line in metrics(run).values()]
        assert losses[0] > 1e-4 and losses[-1] < 0.8 * losses[0], (name, losses)


@pytest.mark.slow
def test_a_reward_model_is_added_to_the_rule(world, lab: Lab, parts) -> None:
    placement = {**own_layout(world.size), "reward": {"pp": 2} if world.size > 1 else {}}
    model = lab.run_rm("bt", {"reward": placement["reward"]})
    weights = {"enable": True, "init_from": str(model), "weight": 0.5, "rule_weight": 2.0}
    options = without(PLAIN, algorithm={"adv_estimator": "grpo"}, reward={**parts, "reward_model": weights})
    run = lab.run("with_model", placement, **options)
    _, samples, _ = read_step(step_path(run / "rollouts", 1))
    _, ruled, _ = read_step(step_path(lab.run("rule_only", placement, **without(PLAIN, reward=parts)) / "rollouts", 1))
    assert samples["uid"].tolist() == ruled["uid"].tolist()
    assert np.std(samples["rm_score"]) > 0
    np.testing.assert_allclose(samples["score"], 2.0 * ruled["score"] + 0.5 * samples["rm_score"], atol=1e-5)
