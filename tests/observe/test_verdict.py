"""The verdict on recorded runs: what it says of bad ones, and that healthy ones raise no alarm."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from hpcrl.observe.read.recorded_run import RecordedRun, read_recorded_run
from hpcrl.observe.report.charts import panels_of
from hpcrl.observe.report.page import write_report
from hpcrl.observe.report.verdict import gradients, verdict_of
from hpcrl.runtime.exits import InputError
from tests.observe.written_runs import metrics, write_config, write_log, write_metrics

RUNS = Path(__file__).parent / "verdict_runs"
BAD = ("collapse", "plateau", "hack")
HEALTHY = sorted(path.stem for path in RUNS.glob("*.jsonl") if path.stem not in BAD)


def recorded(name: str, folder: Path) -> RecordedRun:
    shutil.copy(RUNS / f"{name}.jsonl", folder / "metrics.jsonl")
    return read_recorded_run(folder)


def written(folder: Path, **changes) -> RecordedRun:
    """A run of 60 steps that learns; changes: of metrics, from the step to their values."""
    folder.mkdir(exist_ok=True)
    rng = random.Random(3)
    rows = [metrics(step, rng) for step in range(1, 61)]
    for name, values in changes.items():
        for row in rows:
            row[name.replace("__", "/")] = values(row["step"])
    write_metrics(folder, rows)
    return read_recorded_run(folder)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_raises_no_alarm(name, tmp_path):
    verdict = verdict_of(recorded(name, tmp_path))
    first = verdict.sentences[0]
    assert first.severity == "good" or "may have improved" in first.text or "its noise would hide one" in first.text
    assert not [one.text for one in (*verdict.sentences[1:], *verdict.others) if one.severity != "good"]


def test_there_are_enough_healthy_runs():
    assert len(HEALTHY) >= 10


def test_a_collapse_and_a_plateau(tmp_path):
    collapse = verdict_of(recorded("collapse", tmp_path)).sentences
    assert collapse[0].severity == "bad" and "fell from 17% to 0%" in collapse[0].text
    assert "length limit" in collapse[1].text and len(collapse) == 3
    plateau = verdict_of(recorded("plateau", tmp_path)).sentences
    assert plateau[0].severity == "look" and "did not change beyond its noise" in plateau[0].text


def test_a_reward_for_length(tmp_path):
    sentences = verdict_of(recorded("hack", tmp_path)).sentences
    assert any(one.severity == "bad" and "pays for length" in one.text for one in sentences)


@pytest.mark.parametrize(
    ("changes", "words", "anchor"),
    [
        ({"actor__entropy": lambda step: 1.5 * 0.9**step}, "entropy collapsed", "chart-entropy"),
        ({"actor__grad_norm": lambda step: None if step == 7 else 1.0}, "first in step 7", "chart-gradient-norm"),
        ({"actor__ppo_kl": lambda step: 0.01 * step}, "KL of", "chart-kl"),
        (
            {"training__rollout_log_probs_diff_mean": lambda step: 0.4},
            "differ by 0.4 nats",
            "chart-log-prob-gap-rollout-training",
        ),
        (
            {"response_length__clip_ratio": lambda step: step / 60},
            "cut at the length limit",
            "chart-at-the-limit-aborted",
        ),
        (
            {
                "response_length__mean": lambda step: 100.0 + 5 * step,
                "val-core/maths/acc/mean@1": lambda step: 0.3 + 0.01 * (-1) ** step,
            },
            "pays for length",
            "chart-response-length",
        ),
    ],
)
def test_each_fault_is_named_and_leads_to_its_chart(changes, words, anchor, tmp_path):
    run = written(tmp_path, **changes)
    found = next(one for one in verdict_of(run).sentences if words in one.text)
    assert found.severity in ("bad", "look") and found.anchor == anchor
    assert anchor in [panel["anchor"] for panel in panels_of([run.log])]


def test_validation_that_stays_while_the_reward_rises(tmp_path):
    steady = {"val-core/maths/acc/mean@1": lambda step: 0.3 + 0.01 * (-1) ** step}
    alone = verdict_of(written(tmp_path / "alone", **steady, critic__score__mean=lambda step: 0.2)).sentences[0]
    besides = verdict_of(written(tmp_path / "besides", **steady)).sentences[0]
    assert "did not change" in alone.text and "reward" not in alone.text and "learning rate" in alone.advice
    assert "while the reward of the training samples rose from" in besides.text and "prompts" in besides.advice


def test_a_gradient_that_falls_with_the_loss_is_no_spike(tmp_path):
    falls = written(tmp_path / "falls", actor__grad_norm=lambda step: 30 * 0.7**step)
    jumps = written(tmp_path / "jumps", actor__grad_norm=lambda step: 60.0 if step == 20 else 30 * 0.7**step)
    assert gradients(falls) is None
    assert "in step 20" in gradients(jumps).text


def test_charts_without_a_change_are_flat(tmp_path):
    run = written(tmp_path, reward__errors=lambda step: 0.0)
    flat = {panel["title"]: panel["is_flat"] for panel in panels_of([run.log])}
    assert flat["Failed scores and turns"] and not flat["Reward"]


def test_a_run_that_never_finished_a_step_is_one_line(tmp_path, capsys):
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    write_config(broken)
    write_log(broken, 0, [("10:00:00", "INFO", "derived values on 2 ranks")])
    (broken / "exit.json").write_text('{"code": 1, "rank": 1, "role": "actor", "phase": "load", "error": "no weights"}')
    with pytest.raises(InputError) as raised:
        write_report([str(broken)], tmp_path / "report.html")
    line = str(raised.value)
    assert "never finished a step" in line and "no weights" in line and "phase load" in line and "\n" not in line
    whole.mkdir()
    written(whole)
    write_report([str(whole), str(broken)], tmp_path / "report.html")
    assert "left out" in capsys.readouterr().err and (tmp_path / "report.html").exists()
