"""Whole jobs of four steps with actor and critic, started as a person would, and what they wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.preloaded import RANK
from tests.runtime.conftest import MPIEXEC, REPOSITORY, environment

# Random weights do not all miss it in the same way: with equal scores nothing would be learnt.
SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 7 / 7
"""
START = """
if __name__ == "__main__":
    import sys
    from hpcrl import cli
    cli.main(sys.argv[1:])
"""
NOT_COMPARED = ("timing_s/", "timing_per_token_ms/", "perf/", "memory/")
TP2 = {**dict.fromkeys(("actor", "critic", "ref"), {"tp": 2}), "rollout": {"tp": 2}}


PROMPTS = [
    {
        "data_source": "countdown",
        "prompt": [{"role": "user", "content": f"{i} 2 3 4 {i + 1}:"}],
        "reward_model": {"style": "rule", "ground_truth": {"numbers": [i, 2, 3, 4], "target": i + 1}},
    }
    for i in range(1, 10)
]
MODEL = {
    "tokenizer": str(REPOSITORY / "configs" / "tokenizer"),
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
}


def write_rows(path: Path) -> None:
    """PROMPTS as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))


def write_config(folder: Path, **sections: dict[str, Any]) -> Path:
    """A small GRPO job of three steps in `folder`."""
    write_rows(folder / "train.jsonl")
    config = {
        "run": {"name": "ends", "dir": str(folder / "runs")},
        "model": MODEL,
        "data": {
            "train_files": [str(folder / "train.jsonl")],
            "train_batch_size": 8,
            "max_prompt_length": 16,
            "max_response_length": 8,
        },
        "rollout": {"n": 2},
        "actor": {"ppo_mini_batch_size": 8, "ppo_max_token_len_per_gpu": 128},
        "algorithm": {"adv_estimator": "grpo"},
        "trainer": {"total_training_steps": 3},
        **sections,
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def train(
    folder: Path,
    ranks: int,
    *,
    script: str | None = None,
    before: tuple[str, ...] = (),
    trainer: dict[str, Any] | None = None,
    **sections: dict[str, Any],
) -> int:
    """`hpcrl train` into <folder>/runs/ends; gives its exit code.

    script: Python that changes something in each rank before it starts. before: what starts mpiexec.
    """
    folder.mkdir(exist_ok=True)
    (folder / "score.py").write_text(SCORE)
    options: dict[str, Any] = {
        "algorithm": {"adv_estimator": "gae", "use_kl_in_reward": True},
        "critic": {"ppo_max_token_len_per_gpu": 128},
        "reward": {"custom_reward_function": {"path": str(folder / "score.py")}},
        "trainer": {"total_training_steps": 4, "save_freq": 1, **(trainer or {})},
    }
    config = write_config(folder, **{**options, **sections})
    program = ["-m", "hpcrl"]
    if script is not None:
        (folder / "script.py").write_text(script + START)
        program = [str(folder / "script.py")]
    python = (sys.executable,) if before else RANK  # a preloaded rank is in none of the namespaces that `before` makes
    command = [*before, str(MPIEXEC), "-n", str(ranks), *python, *program, "train", str(config)]
    return subprocess.run(command, cwd=folder, env=environment(), stdin=subprocess.DEVNULL, timeout=300).returncode


def run_folder(folder: Path) -> Path:
    return folder / "runs" / "ends"


def open_to_others(run: Path) -> list[str]:
    """What in a run's folder is not for its user only."""
    found = [path for path in (run, *run.rglob("*")) if not path.is_symlink() and path.stat().st_mode & 0o077]
    return [f"{path} {path.stat().st_mode:o}" for path in found]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (run_folder(folder) / "checkpoints").iterdir())


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_folder(folder) / "metrics.jsonl").read_text().splitlines()]


def compared(folder: Path) -> list[dict[str, float]]:
    """All metrics that are no times and sizes, by step."""
    return [{k: v for k, v in line.items() if not k.startswith(NOT_COMPARED)} for line in lines(folder)]


def log_of(folder: Path, rank: int = 0) -> str:
    return (run_folder(folder) / "logs" / f"rank_{rank:05d}.log").read_text()
