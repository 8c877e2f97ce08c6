"""The judge: verdicts do not depend on its layout or on batching, and nonsense costs its own samples only."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.observe.read.archive import read_samples
from hpcrl.observe.record.archive import step_path
from hpcrl.rollout.engines.native.engine import NativeEngine
from tests.mpi.lab import ROOT, Lab, metrics

MODEL = {
    "tokenizer": str(ROOT / "configs" / "tokenizer"),
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "init_std": 0.5,
}
JUDGE = {
    "enable": True,
    "model": MODEL,
    "template": "{prompt}:{response}=",
    "pattern": r"(\d)",
    "scale": [0, 9],
    "max_prompt_length": 64,
    "max_response_length": 6,
}
SIMPLE = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "actor": {"use_kl_loss": False},
    "model": {"vocab_size": None},
}


def run(
    lab: Lab, name: str, judge: dict[str, Any] | None = None, placement: dict[str, Any] | None = None, **sections: Any
) -> Path:
    wanted = {**JUDGE, **(judge or {})}
    return lab.run(name, placement or {}, reward={"judge": wanted}, **{**SIMPLE, **sections})


def verdicts(run: Path, step: int = 1) -> dict[tuple[str, int], tuple[str, float | None]]:
    """(uid, sample index) -> the judge's answers and score."""
    found = read_samples(step_path(run / "rollouts", step))
    names = zip(found["uid"], found["sample_index"].tolist(), strict=True)
    scores = [None if np.isnan(score) else score for score in found["judge_score"].tolist()]
    return dict(zip(names, zip(found["verdicts"], scores, strict=True), strict=True))


def placements(size: int) -> dict[str, dict[str, Any]]:
    everywhere = {"tp": {"judge": {"tp": 2}}}  # the judge has two key-value heads
    apart = {"apart": {"pools": {"all": "*", "last": str(size - 1)}, "judge": {"pool": "last"}}}
    return {1: {}, 2: everywhere | apart, 4: everywhere | apart}[size]


@pytest.mark.ci_world(2)
@pytest.mark.parametrize("kind", [{}, {"kind": "pairwise", "template": "{response}-{other}=", "pattern": "([012])"}])
def test_verdicts_do_not_depend_on_layout_or_batching(world, lab: Lab, kind: dict[str, Any], monkeypatch) -> None:
    if kind:
        monkeypatch.setattr("hpcrl.rewards.judge.WINS", {"0": 1.0, "1": 0.0, "2": 0.5})
    once = {"trainer": {"total_training_steps": 1}}
    name = f"judged_{len(kind)}"
    expected = verdicts(run(lab, name, kind, **once))
    scores = [score for _, score in expected.values() if score is not None]
    assert len(scores) > 0.3 * len(expected) and np.std(scores) > 0.05
    for text, _ in expected.values():
        assert len(json.loads(text)) == (2 if kind else 1)  # of n = 2 samples, in both orders
    small = run(lab, f"{name}_small", {**kind, "max_num_seqs": 3, "max_num_batched_tokens": 64}, **once)
    assert verdicts(small) == expected
    for other, placement in placements(world.size).items():
        found = verdicts(run(lab, f"{name}_{other}", kind, placement, **once))
        assert found.keys() == expected.keys()
        same = [found[key][0] == text for key, (text, _) in expected.items()]
        assert np.mean(same) >= 0.95  # a sum in another order can turn a tie


@pytest.mark.ci_world(2)
def test_nonsense_costs_its_samples_only(world, lab: Lab, caplog) -> None:
    """Without verdicts the run is the one without a judge, but for the numbers that say so."""
    expected = metrics(lab.run("no_judge", **SIMPLE))
    with caplog.at_level(logging.WARNING):
        folder = run(lab, "nonsense", {"pattern": "(hello)", "num_retries": 2})
    found = metrics(folder)
    for step, line in expected.items():
        assert found[step].pop("reward/judge/unparsed_ratio") == 1.0
        assert np.isnan(found[step].pop("reward/judge/mean") or np.nan)
        assert found[step] == line
    assert "have no verdict that reward.judge.pattern finds; an answer: " in caplog.text
    assert all(score is None for _, score in verdicts(folder).values())


@pytest.mark.ci_world(2)
def test_resumed_equals_uninterrupted_bitwise(world, lab: Lab, monkeypatch) -> None:
    """And what an earlier attempt has asked is not asked again."""
    judge = {"temperature": 1.0, "num_retries": 3, "default_score": 0.25, "weight": 0.5, "rule_weight": 2.0}
    make = lambda name, steps: run(lab, name, judge, trainer={"total_training_steps": steps, "save_freq": 1})  # noqa: E731
    straight, _ = make("judge_straight", 2), make("judge_halted", 1)
    halted = make("judge_halted", 2)
    assert metrics(halted) == metrics(straight)
    for step in (1, 2):
        assert verdicts(halted, step) == verdicts(straight, step)
        samples = read_samples(step_path(halted / "rollouts", step))
        for score, text, judged in zip(samples["score"], samples["extras"], samples["judge_score"], strict=True):
            extras = json.loads(text)
            assert ("judge_score" in extras) == (judged == judged)
            assert score == pytest.approx(2 * extras["rule_score"] + 0.5 * extras.get("judge_score", 0.25), abs=1e-6)

    generate, drawn = NativeEngine.generate, []

    def counted(self, requests, sampling, **options):
        drawn.extend(request for request in requests if sampling.max_new_tokens == JUDGE["max_response_length"])
        return generate(self, requests, sampling, **options)

    monkeypatch.setattr(NativeEngine, "generate", counted)
    again = lab.folder / "judge_again"
    if world.rank == 0:
        again.mkdir()
        shutil.copytree(straight / "judge", again / "judge")
    world.barrier()
    recorded = {"total_training_steps": 2, "rollouts_from": str(straight / "rollouts")}
    run(lab, "judge_again", judge, trainer=recorded)
    assert not drawn and verdicts(again, 2) == verdicts(straight, 2)


@pytest.mark.ci_world(2)
def test_weights_of_a_checkpoint_and_of_a_hugging_face_directory(world, lab: Lab) -> None:
    """The policy of another run is the judge, split and whole; and `hpcrl generate` asks it too."""
    trained = run(lab, "judge_trained", {"enable": False}, trainer={"save_freq": 1, "save_hf": True})
    exported = trained / "checkpoints" / "step_00000002" / "huggingface"
    once = {"trainer": {"total_training_steps": 1}}
    split = run(
        lab, "judge_split", {"model": None, "init_from": str(trained)}, {"judge": {"tp": min(world.size, 2)}}, **once
    )
    whole = run(lab, "judge_whole", {"model": {"path": str(exported)}}, **once)
    found, expected = verdicts(split), verdicts(whole)
    assert np.mean([found[key][0] == text for key, (text, _) in expected.items()]) >= 0.95
    files = {"val_files": [str(lab.data / "val.parquet")], "val_max_samples": 3}
    output = lab.folder / "judge_lines.jsonl"
    sections = {"data": files, "generate": {"output_path": str(output)}}
    run(lab, "judge_lines", {"model": {"path": str(exported)}}, job="generate", **sections)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(lines) == 6
    for line in lines:
        assert len(line["verdicts"]) == 1 and "rule_score" in line
        expected = line["rule_score"] + line.get("judge_score", 0.0)
        assert line["score"] == pytest.approx(expected, abs=1e-5)


APART = {
    "pools": {"train": "1", "generate": "2", "judge": "3"},
    **dict.fromkeys(("actor", "ref", "critic"), {"pool": "train"}),
    "rollout": {"pool": "generate"},
    "judge": {"pool": "judge"},
}


def asynchronous(lab: Lab, name: str, mode: str, steps: int) -> Path:
    trainer = {"total_training_steps": steps, "save_freq": 1}
    return run(lab, name, None, APART, trainer=trainer, async_training={"mode": mode})


@pytest.mark.slow
@pytest.mark.world(4)
def test_one_step_off_resumed_equals_uninterrupted_bitwise(world, lab: Lab) -> None:
    """Samples that waited in a checkpoint keep their verdicts."""
    straight = asynchronous(lab, "judge_off_straight", "one_step_off", 3)
    for steps in (1, 3):
        halted = asynchronous(lab, "judge_off_halted", "one_step_off", steps)
    assert metrics(halted) == metrics(straight)
    for step in (1, 2, 3):
        assert verdicts(halted, step) == verdicts(straight, step)


@pytest.mark.world(4)
def test_generation_that_never_stops(world, lab: Lab) -> None:
    for steps in (1, 3):
        folder = asynchronous(lab, "judge_bounded", "bounded_staleness", steps)
    lines = metrics(folder)
    for step in lines:
        found = verdicts(folder, step)
        assert len(found) == 24 and all(len(json.loads(text)) == 1 for text, _ in found.values())
    # A step may take samples only that were judged in the step before it, and few verdicts may all be unreadable.
    assert any(line.get("reward/judge/mean") is not None for line in lines.values())
    assert "timing_s/judge" in (folder / "metrics.jsonl").read_text()
