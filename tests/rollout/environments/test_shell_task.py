"""A scripted agent solves tasks in shells, from a folder and from an archive, while others do not."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.algorithms.metrics import finish
from hpcrl.config.schema import DataConfig, MultiTurnConfig
from hpcrl.rollout.environments.loop import AgentLoop
from hpcrl.rollout.protocol import Request, SamplingParams
from hpcrl.sandbox.task_sandbox import probe_sandbox
from tests.rollout.environments.scripted import ScriptedEngine

SOLUTION = ["grep -rl 7 . ", "cp $(grep -rl 7 .) answer", "done"]
CHEATS = [
    ["(while :; do echo true > check.sh; done) &", "ls", "done"],
    ["echo 'exit 0' > ~/.bash_profile; cp ~/.bash_profile ~/.bashrc", "done"],
    ["mkdir check.sh", "done"],
    ["chmod 0 .", "done"],
]


def test_tasks_in_shells(tmp_path: Path, tokenizer: Any) -> None:
    if why := probe_sandbox().why_not:
        pytest.skip(why)
    task = tmp_path / "task"
    (task / "a" / "b").mkdir(parents=True)
    (task / "a" / "b" / "hidden").write_text("7")
    with tarfile.open(tmp_path / "task.tar.gz", "w:gz") as archive:
        archive.add(task, ".")
    (tmp_path / "shell.py").write_text("from hpcrl.api import ShellTask")
    environment = {"path": str(tmp_path / "shell.py"), "name": "ShellTask"}
    cfg = MultiTurnConfig.model_validate({"enable": True, "environment": environment})
    rows = [(str(task), SOLUTION), (str(tmp_path / "task.tar.gz"), SOLUTION)]
    rows += [(str(task), cheat) for cheat in CHEATS]
    extra = {"test": "bash check.sh", "test_files": {"check.sh": "grep -q 7 answer"}}
    records = [{"prompt": [{"role": "user", "content": "x"}], "extra_info": {"task": it, **extra}} for it, _ in rows]

    def says(request: Request) -> np.ndarray:
        turn = rows[int(request.uid)][1][tokenizer.decode(request.prefix_ids).count("</tool_call>")]
        text = f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': turn}})}</tool_call>"
        ids = tokenizer(turn if turn == "done" else text, add_special_tokens=False)["input_ids"]
        return np.array([*ids, tokenizer.eos_token_id], np.int32)

    loop = AgentLoop(cfg, DataConfig(max_prompt_length=1000), tokenizer)
    requests = [Request([1, 5], str(number)) for number in range(len(rows))]
    sampling = SamplingParams(600, eos_token_ids=(tokenizer.eos_token_id,))
    engine: Any = ScriptedEngine(says)
    found, metrics = loop.run(engine, requests, records, sampling, seed=0, step=0)
    loop.close()
    assert [one.finish_reason for one in found] == ["stop"] * len(rows)
    assert [one.rewards.sum() for one in found] == [1.0] * 2 + [0.0] * len(CHEATS)  # type: ignore[union-attr]
    ends = ["ok", "ok", "error", "error", "check.sh: Is a directory", "check.sh: Permission denied"]
    assert [one.info["test"] for one in found] == ends  # type: ignore[index]
    assert "a/b/hidden" in tokenizer.decode(found[1].token_ids)
    assert finish(metrics)["env/acc/mean"] == pytest.approx(2 / len(rows))
    assert (task / "a" / "b" / "hidden").exists() and not (task / "answer").exists()
