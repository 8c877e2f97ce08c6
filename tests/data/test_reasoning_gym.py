"""`hpcrl data reasoning_gym` and its rule, with the real package in an environment of its own."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from hpcrl.data.drawn import Task, mixed_tasks, task_of
from hpcrl.data.row_file import RowFile
from hpcrl.rewards.registry import rule_for
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox.isolation import probe_isolation
from tests.extra_environments import python_with, run, two_steps
from tests.mpi.lab import ROOT

TASKS = ["leg_counting:3@0-1", "spell_backward@2", "countdown:0.4"]
SCORES = """
import json, sys
from hpcrl.data.row_file import RowFile
from hpcrl.rewards.registry import scorer_for
for row in {row["data_source"]: row for row in RowFile(sys.argv[1])}.values():
    given = row["reward_model"]["ground_truth"], row["extra_info"]
    answers = [f"<think></think> {row['answer']}", "<answer>7</answer> or <answer>" + given[0] + "</answer>", "none",
               "<answer>open('/tmp/" + sys.argv[2] + "', 'w')</answer>"]
    print(json.dumps([scorer_for(row["data_source"])(row["data_source"], it, *given)["acc"] for it in answers]))
"""


def test_tasks_on_the_command_line() -> None:
    assert task_of("chain_sum") == Task("chain_sum", 1.0, None)
    assert task_of("chain_sum:0.5@2") == Task("chain_sum", 0.5, range(2, 3))
    assert task_of("leg_counting@0-3") == Task("leg_counting", 1.0, range(4))
    for wrong in ("", "a b", "x@", "x:-1", "x@3-1"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected TASK"):
            task_of(wrong)


@pytest.mark.skipif(find_spec("reasoning_gym") is not None, reason="the package is installed")
def test_without_the_package() -> None:
    with pytest.raises(InputError, match=r"pip install 'hpcrl\[reasoning-gym\]'"):
        mixed_tasks(argparse.Namespace(tasks=[task_of("chain_sum")], seed=0))
    with pytest.raises(
        InputError, match=r"reasoning-gym, which is not installed; pip install 'hpcrl\[reasoning-gym\]'"
    ):
        rule_for("reasoning_gym/chain_sum")


@pytest.mark.slow
def test_rows_scores_and_two_training_steps(tmp_path: Path) -> None:
    python = python_with("reasoning-gym")
    out = tmp_path / "rows"
    options = ["--rows", "64", "--val-rows", "4", "--seed", "3"]
    run(python, "data", "reasoning_gym", "--tasks", *TASKS, *options, "--out", str(out))
    rows = [*RowFile(str(out / "train.parquet"))]
    kinds = Counter((row["data_source"], row["extra_info"]["level"]) for row in rows)
    expected = ("leg_counting", 0), ("leg_counting", 1), ("spell_backward", 2), ("countdown", -1)
    assert set(kinds) == {(f"reasoning_gym/{name}", level) for name, level in expected}
    assert sum(kinds["reasoning_gym/leg_counting", level] for level in (0, 1)) > 24

    if probe_isolation().complete:
        name = f"hpcrl_{tmp_path.name}"
        (tmp_path / "scores.py").write_text(SCORES)
        command = [python, str(tmp_path / "scores.py"), str(out / "train.parquet"), name]
        found = subprocess.run(
            command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
        ).stdout
        assert [json.loads(line) for line in found.splitlines()] == [[1.0, 1.0, 0.0, 0.0]] * 3
        assert not Path("/tmp", name).exists()

    data = {"train_batch_size": 4, "train_files": [str(out / "train.parquet")], "max_prompt_length": 600}
    lines = two_steps(python, tmp_path, data=data, reward={"timeout": 60.0})
    assert len(lines) == 2 and all(line["reward/errors"] == 0 == line["reward/timeouts"] for line in lines)
