"""`hpcrl train` as a whole: layouts agree, a resumed run is the uninterrupted one, rollout and training agree."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.observe.read.archive import read_step
from hpcrl.observe.record.archive import step_path
from tests.mpi.lab import Lab, metrics, on, own_layout


def placements(size: int) -> dict[str, dict[str, Any]]:
    if size == 2:
        return {"tp2": on(2, tp=2), "pp2": on(2, pp=2), "dp2": on(2)}
    return {
        "tp2_dp2": on(4, tp=2),
        "tp2_pp2": on(4, tp=2, pp=2),
        "critic_apart_in_layout": {**on(4, tp=2), "critic": {"pp": 2}, "rollout": {"tp": 1}},
        "critic_on_its_own_ranks": {
            "pools": {"policy": "0-1", "value": "2-3"},
            "actor": {"pool": "policy", "pp": 2},
            "ref": {"pool": "value", "tp": 2},
            "rollout": {"pool": "policy", "tp": 2},
            "critic": {"pool": "value"},
        },
        "rank_0_in_no_role": {
            "pools": {"work": "1-3"},
            **{role: {"pool": "work"} for role in ("actor", "critic", "ref", "rollout")},
        },
    }


ALONE = {"pools": {"one": "0"}, **{role: {"pool": "one"} for role in ("actor", "critic", "ref", "rollout")}}
SGD = {
    "actor": {"optim": {"optimizer": "sgd", "lr": 0.05}},
    "critic": {"optim": {"optimizer": "sgd", "lr": 0.05}},
}


@pytest.fixture(scope="session")
def alone(lab: Lab) -> Path:
    """The reference: all roles on rank 0, the other ranks idle."""
    return lab.run("alone", ALONE, **SGD)


@pytest.mark.slow
@pytest.mark.ci_world(4)
@pytest.mark.world(2, 4)
def test_layouts_agree_on_recorded_rollouts(world, lab: Lab, alone: Path) -> None:
    expected = metrics(alone)
    recorded = {step: read_step(step_path(alone / "rollouts", step)) for step in (1, 2)}
    for name, placement in placements(world.size).items():
        run = lab.run(name, placement, trainer={"rollouts_from": str(alone / "rollouts")}, **SGD)
        found = metrics(run)
        for step in (1, 2):
            for key in ("actor/grad_norm", "critic/grad_norm"):
                assert found[step][key] == pytest.approx(expected[step][key], rel=1e-4), (name, step, key)
            # 1e-5 of the sum of the terms' sizes: that is the value itself where terms are not negative, and for
            # pg_loss the mean of |advantage|, which whitening brings to about 1.
            for key in ("critic/vf_loss", "actor/kl_loss", "actor/entropy", "actor/entropy_loss"):
                assert found[step][key] == pytest.approx(expected[step][key], rel=1e-5, abs=1e-8), (name, step, key)
            assert abs(found[step]["actor/pg_loss"] - expected[step]["actor/pg_loss"]) <= 1e-5, (name, step)
            tokens, _, _ = read_step(step_path(run / "rollouts", step))
            assert tokens.keys() == recorded[step][0].keys()
            for column, (values, offsets) in tokens.items():
                assert np.array_equal(offsets, recorded[step][0][column][1]), (name, step, column)
                np.testing.assert_allclose(
                    values, recorded[step][0][column][0], rtol=0, atol=1e-4, err_msg=f"{name} {step} {column}"
                )


@pytest.mark.slow
@pytest.mark.ci_world(4)
@pytest.mark.world(2, 4)
def test_layouts_sample_the_same_tokens(world, lab: Lab, alone: Path) -> None:
    """Before any weight differs: the first step's prompts are the same, and so are at least 99% of the responses. One
    placement for each layout of the engine."""
    wide = {"ppo_max_token_len_per_gpu": 4096}  # what follows generation is not looked at
    options = {
        "trainer": {"total_training_steps": 1},
        "data": {"train_batch_size": 64},
        "actor": {**SGD["actor"], "ppo_mini_batch_size": 64, **wide},
        "critic": wide,
    }
    reference = lab.run("sampled_alone", ALONE, **options)
    tokens, samples, _ = read_step(step_path(reference / "rollouts", 1))
    for name, placement in placements(world.size).items():
        if name in ("tp2_pp2", "pp2"):  # generate as tp2_dp2 and dp2
            continue
        run = lab.run(f"sampled_{name}", placement, **options)
        other_tokens, other_samples, _ = read_step(step_path(run / "rollouts", 1))
        assert other_samples["uid"].tolist() == samples["uid"].tolist()
        same = [
            np.array_equal(mine, others)
            for mine, others in zip(_rows(tokens["input_ids"]), _rows(other_tokens["input_ids"]), strict=True)
        ]
        assert np.mean(same) >= 0.99, name


def _rows(column: tuple[np.ndarray, np.ndarray]) -> list[np.ndarray]:
    return np.split(column[0], column[1][1:-1])


@pytest.mark.ci_world(2)
def test_resumed_equals_uninterrupted_bitwise(world, lab: Lab, caplog) -> None:
    placement = own_layout(world.size)
    straight = lab.run("straight", placement, trainer={"total_training_steps": 4})
    lab.run("halted", placement, trainer={"total_training_steps": 2, "save_freq": 2})
    resumed = lab.run("halted", placement, trainer={"total_training_steps": 4, "save_freq": 2})
    expected, found = metrics(straight), metrics(resumed)
    assert sorted(found) == [1, 2, 3, 4]
    for step, line in expected.items():
        assert found[step] == line, f"step {step}"

    if world.rank == 0:  # a damaged checkpoint is passed over: the run goes on from the one before, to the same end
        for file in (resumed / "checkpoints" / "step_00000004" / "actor").glob("*.distcp"):
            file.write_bytes(file.read_bytes()[:-1])
    world.barrier()
    with caplog.at_level("WARNING"):
        lab.run("halted", placement, trainer={"total_training_steps": 4, "save_freq": 2})
    assert metrics(resumed) == found
    if world.rank == 0:
        assert "using step_00000002 instead" in caplog.text


@pytest.mark.ci_world(2)
def test_a_resumed_job_with_rollout_in_8_bits(world, lab: Lab, caplog) -> None:
    """Its gap of log-probs is reported, and a correction is recommended."""
    placement = {"actor": {"tp": min(2, world.size)}, "rollout": {"tp": 1}}
    rollout = {"quantization": "fp8", "kv_cache_dtype": "fp8", "checkpoint_engine": {"verify": "always"}}
    with caplog.at_level("WARNING"):
        straight = lab.run("straight_fp8", placement, rollout=rollout, trainer={"total_training_steps": 2})
    lab.run("halted_fp8", placement, rollout=rollout, trainer={"total_training_steps": 1, "save_freq": 1})
    resumed = lab.run("halted_fp8", placement, rollout=rollout, trainer={"total_training_steps": 2, "save_freq": 1})
    assert metrics(resumed) == metrics(straight)
    gaps = [line["training/rollout_log_probs_diff_mean"] for line in metrics(straight).values()]
    assert len(gaps) == 2 and all(1e-4 < gap < 0.5 for gap in gaps), gaps
    if world.rank == 0:
        assert "algorithm.rollout_correction.preset=decoupled_token_is" in caplog.text


@pytest.mark.slow
@pytest.mark.world(4)
def test_resume_on_another_layout(world, lab: Lab) -> None:
    """Same data order, and the first step on recorded rollouts agrees, optimizer state included."""
    first = lab.run("first_layout", own_layout(4), trainer={"total_training_steps": 3, "save_freq": 2})
    shapes = {"pp2": on(4, pp=2), "dp4": on(4), "tp2_pp2": on(4, tp=2, pp=2)}
    for name, placement in shapes.items():
        if world.rank == 0:
            step = "checkpoints/step_00000002"
            shutil.copytree(first / step, lab.folder / f"moved_{name}" / step)
        world.barrier()
        trainer = {"total_training_steps": 4, "rollouts_from": str(first / "rollouts")}
        if name == "pp2":  # without a recording: only the order of the data is compared
            lab_run = lab.run(f"moved_{name}", placement, trainer={"total_training_steps": 3})
        else:
            lab_run = lab.run(f"moved_{name}", placement, trainer={**trainer, "total_training_steps": 3})
        tokens, samples, _ = read_step(step_path(first / "rollouts", 3))
        other_tokens, other_samples, _ = read_step(step_path(lab_run / "rollouts", 3))
        assert other_samples["uid"].tolist() == samples["uid"].tolist()
        if name == "pp2":
            continue
        found, expected = metrics(lab_run)[3], metrics(first)[3]
        for key in ("actor/grad_norm", "critic/grad_norm"):
            assert found[key] == pytest.approx(expected[key], rel=1e-3), (name, key)
        for column in ("old_log_probs", "values", "ref_log_prob"):
            np.testing.assert_allclose(other_tokens[column][0], tokens[column][0], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.ci_world(2)
def test_rollout_and_training_log_probs_agree_over_ten_steps(world, lab: Lab) -> None:
    """With an engine whose layout is not the actor's: where it is, the weights are aliased and cannot be stale."""
    placement = {**own_layout(world.size), "rollout": {"tp": 1}}
    run = lab.run("ten_steps", placement, trainer={"total_training_steps": 10, "save_rollouts": False})
    for step, line in metrics(run).items():
        assert line["training/rollout_log_probs_diff_max"] < 1e-4, step
        assert line["training/rollout_log_probs_diff_mean"] < 1e-5, step


@pytest.mark.ci_world(2)
def test_ratio_stays_at_one_without_learning(world, lab: Lab) -> None:
    run = lab.run("frozen", own_layout(world.size), actor={"optim": {"lr": 0.0}, "ppo_epochs": 2})
    for line in metrics(run).values():
        assert line["actor/ratio_deviation_max"] < 1e-5
        assert line["actor/pg_clipfrac"] == 0


@pytest.mark.slow
@pytest.mark.ci_world(2)
def test_rank_0_traffic_does_not_grow_with_the_response(world, lab: Lab) -> None:
    """Control messages in any layout; and all that rank 0 sends and receives, when it holds no columns itself."""
    cases = {"own": own_layout(world.size)}
    if world.size > 1:
        cases["apart"] = {
            "pools": {"work": f"1-{world.size - 1}"},
            **{role: {"pool": "work"} for role in ("actor", "critic", "ref", "rollout")},
        }
    for case, placement in cases.items():
        traffic = {}
        for length in (8, 64):
            run = lab.run(
                f"{case}_length_{length}",
                placement,
                data={"max_response_length": length},
                rollout={"ignore_eos": True},
                actor={"ppo_max_token_len_per_gpu": 2048},
                critic={"ppo_max_token_len_per_gpu": 2048},
                trainer={"total_training_steps": 1},
            )
            line = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
            assert line["response_length/mean"] == length
            who = "rank_0" if case == "apart" else "controller"
            traffic[length] = line[f"perf/{who}_bytes_sent"] + line[f"perf/{who}_bytes_received"]
        assert traffic[8] > 0 or world.size == 1
        assert abs(traffic[64] - traffic[8]) <= 0.01 * traffic[8] + 64, case


@pytest.mark.slow
@pytest.mark.ci_world(2)
def test_warm_start_then_ppo_on_the_task(world, lab: Lab) -> None:
    """SFT with evaluation; then PPO from its weights with the rule-based reward and validation."""
    options = {"eval_freq": 2, "eval_samples": 8, "batch_size": 16, "optim": {"lr": 1e-2}}
    placement = {1: {}, 2: on(2, pp=2), 4: on(4, tp=2)}[world.size]
    model: dict[str, Any] = {"vocab_size": None}  # the tokenizer's, so that some answers score
    data = {"val_files": [str(lab.data / "val.parquet")]}
    straight = lab.run_sft("sft_straight", placement, model=model, sft={**options, "total_training_steps": 4})
    losses = [line["train/loss"] for line in metrics(straight).values()]
    assert losses[-1] < losses[0]
    assert "val-core/countdown/acc/mean@1" in metrics(straight)[4]

    run = lab.run(
        "after_sft",
        own_layout(world.size),
        model={**model, "init_from": str(straight)},
        data={**data, "val_max_samples": 8, "max_response_length": 18, "train_batch_size": 96},
        rollout={"val_kwargs": [{"n": 1, "temperature": 0.0}, {"n": 2, "temperature": 1.0}]},
        reward={"custom_reward_function": {"path": None}},
        trainer={"test_freq": 1, "critic_warmup": 1},
    )
    found = metrics(run)
    assert sorted(found) == [0, 1, 2]
    for line in found.values():
        assert {"val-core/countdown/acc/mean@1", "val-core/countdown/acc/mean@2"} <= line.keys()
    assert "actor/grad_norm" not in found[1] and found[1]["critic/grad_norm"] > 0  # the critic warms up alone
    # Actor and reference started from the same weights, so the first step's policy is the reference.
    assert abs(found[1]["actor/reward_kl_penalty"]) < 1e-6
    assert found[2]["actor/grad_norm"] > 0
    if world.rank == 0:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(run / "tensorboard")).Reload()
        assert "validation/samples/text_summary" in events.Tags()["tensors"]


@pytest.mark.slow
@pytest.mark.ci_world(2)
def test_grpo_and_others_run_without_a_critic(world, lab: Lab) -> None:
    for estimator in ("grpo", "rloo", "reinforce_plus_plus"):
        run = lab.run(
            estimator, own_layout(world.size), algorithm={"adv_estimator": estimator}, trainer={"save_rollouts": False}
        )
        line = metrics(run)[2]
        assert "critic/vf_loss" not in line
        assert line["actor/grad_norm"] > 0
