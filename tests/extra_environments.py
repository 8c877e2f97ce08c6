"""Jobs of the user's command line, also in environments of extras whose pins exclude those of the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.mpi.lab import ROOT

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
MODEL = {
    "num_layers": 1,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 2,
    "num_query_groups": 1,
    "max_position_embeddings": 1024,
    "init_std": 0.2,
}

MPI = Path(sys.prefix, "lib", "libmpi.so.12")


def python_with(extra: str) -> str:
    """The interpreter of an environment with an extra. Skips the test, with the reason, if there can be none."""
    tool = [str(ROOT / "tools" / "extra_environment.sh"), extra]
    made = subprocess.run(tool, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(made.stderr.strip())
    return f"{made.stdout.strip()}/bin/python"


def run(python: str, *arguments: str, modules: Path = ROOT) -> None:
    behind = {"MPI4PY_LIBMPI": str(MPI)} if MPI.exists() else {}  # of the wheel, which is found beside an interpreter
    path = f"{Path(python).parent}:{os.environ['PATH']}"  # verifiers starts programs of its environment
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{modules}", "PATH": path, **behind}
    ran = subprocess.run([python, "-m", "hpcrl", *arguments], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr or ran.stdout


def two_steps(python: str, folder: Path, **sections: dict[str, Any]) -> list[dict[str, float]]:
    """The metrics of two training steps of GRPO on one rank. folder: of modules that an environment imports, too."""
    job: dict[str, dict[str, Any]] = {
        "run": {"name": "job", "dir": str(folder)},
        "model": MODEL | {"tokenizer": str(folder / "tokenizer")},
        "data": {"train_batch_size": 4, "max_prompt_length": 384, "max_response_length": 48},
        "rollout": {"n": 2},
        "actor": {"ppo_mini_batch_size": 4},
        "algorithm": {"adv_estimator": "grpo"},
        "trainer": {"total_training_steps": 2},
    }
    tool = [str(ROOT / "tools" / "make_char_tokenizer.py"), "--out", str(folder / "tokenizer")]
    subprocess.run([sys.executable, *tool, "--characters", ALPHABET], check=True, capture_output=True)
    for name, section in sections.items():
        job[name] = {**job.get(name, {}), **section}
    (folder / "job.yaml").write_text(json.dumps(job))
    run(python, "train", str(folder / "job.yaml"), modules=folder)
    lines = (folder / "job" / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["step"] > 0]


def rows(folder: Path) -> dict[str, Any]:
    """The section `data` of a job whose prompts are those of its environment."""
    prompt = {"prompt": [{"role": "system", "content": "Play."}], "data_source": "x"}
    lines = [json.dumps(prompt | {"extra_info": {"index": number % 4}}) for number in range(8)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return {"train_batch_size": 4, "train_files": [str(folder / "rows.jsonl")]}


def acts(path: Path, name: str, **kwargs: str | float | bool) -> dict[str, Any]:
    """The section `rollout` of a job with an environment."""
    environment = {"path": str(path), "name": name, "kwargs": kwargs}
    return {"n": 2, "multi_turn": {"enable": True, "environment": environment}}
