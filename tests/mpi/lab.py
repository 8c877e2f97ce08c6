"""Small whole jobs in the session's world, and what they wrote."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from hpcrl.cli import load_job
from hpcrl.config.schema import Config
from hpcrl.observe.record.archive import RecordLog, generation_logs, read_records
from hpcrl.runtime.job import run_directory

ROOT = Path(__file__).parents[2]
NOT_COMPARED = (
    *("timing_s/", "timing_per_token_ms/", "perf/", "memory/"),
    *("fully_async/trainer/idle_ratio", "fully_async/rollouter/idle_ratio"),
)


def run_job(world, name: str, config: Config) -> int:
    """`hpcrl NAME` on the ranks of the session's world; the exit code."""
    job = load_job(name)
    if world.rank == 0:
        run_directory(config).mkdir(parents=True, exist_ok=True)
    world.barrier()
    code = job(world, config, job.check_with_torch(config, world.size), Namespace()).main()
    world.barrier()
    return code


def make_countdown_files(folder: Path) -> None:
    tool = str(ROOT / "tools" / "prepare_countdown.py")
    subprocess.run([sys.executable, tool, "--out", str(folder), "--sft-rows", "64"], check=True, capture_output=True)


# A reward that random weights do not all miss in the same way: with equal scores, advantages would be amplified noise.
SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 7 / 7
"""


class Lab:
    """Runs small jobs in the session's world, and reads what they wrote."""

    def __init__(self, world, data: Path, folder: Path) -> None:
        self.world, self.data, self.folder = world, data, folder
        if world.rank == 0:
            (folder / "score.py").write_text(SCORE)
        world.barrier()

    def run(
        self, name: str, placement: dict[str, Any] | None = None, *, job: str = "train", **sections: dict[str, Any]
    ) -> Path:
        made = load_job(job)
        config = made.schema().model_validate(self.config(name, placement or {}, sections))
        run_job(self.world, job, made.prepare(config))
        return self.folder / name

    def run_sft(self, name: str, placement: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Path:
        data = {"train_files": [str(self.data / "sft.parquet")], "val_files": [str(self.data / "val.parquet")]}
        rules = {"custom_reward_function": {"path": None}}
        sections = {**sections, "data": {**data, "max_response_length": 18}, "reward": rules}
        template = self.config(name, placement or {}, sections)
        template["trainer"].pop("total_training_steps")
        return self.run_template("sft", template)

    def run_rm(self, name: str, placement: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Path:
        files = {"train_files": [str(self.data / "preference.parquet")], "max_response_length": 18}
        options = {"batch_size": 8, "total_training_steps": 2, "optim": {"lr": 1e-3}}
        template = self.config(name, placement or {}, {"data": files, "rm": options, **sections})
        template["trainer"].pop("total_training_steps")
        return self.run_template("rm", template)

    def run_template(self, job: str, template: dict[str, Any]) -> Path:
        run_job(self.world, job, load_job(job).schema().model_validate(template))
        return self.folder / template["run"]["name"]

    def config(self, name: str, placement: dict[str, Any], sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
        template: dict[str, dict[str, Any]] = {
            "run": {"name": name, "dir": str(self.folder)},
            "model": {
                "tokenizer": str(ROOT / "configs" / "tokenizer"),
                "vocab_size": 60,  # more than the tokenizer's 25 ids: with tp 2 each rank has columns that are drawn
                "softmax_vocab": "config",
                "num_layers": 2,
                "hidden_size": 64,
                "ffn_hidden_size": 96,
                "num_attention_heads": 4,
                "num_query_groups": 2,
                "init_std": 0.2,
            },
            "placement": placement,
            "data": {
                "train_files": [str(self.data / "train.parquet")],
                "train_max_samples": 256,
                "train_batch_size": 12,
                "max_prompt_length": 16,
                "max_response_length": 12,
            },
            "rollout": {"n": 2},
            "actor": {
                "ppo_mini_batch_size": 6,
                "ppo_max_token_len_per_gpu": 256,
                "use_kl_loss": True,
                "entropy_coeff": 0.01,
                "optim": {"lr": 1e-3},
            },
            "critic": {"optim": {"lr": 1e-3}, "ppo_max_token_len_per_gpu": 256},
            "algorithm": {"lam": 0.9, "use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive", "horizon": 100}},
            "trainer": {"total_training_steps": 2},
            "reward": {"custom_reward_function": {"path": str(self.folder / "score.py")}},
        }
        for section, values in sections.items():
            template[section] = _merged(template.get(section, {}), values)
        return template


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    nested = {k: _merged(base[k], v) for k, v in over.items() if isinstance(v, dict) and isinstance(base.get(k), dict)}
    return {**base, **over, **nested}


def metrics(run: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: {k: v for k, v in line.items() if not k.startswith(NOT_COMPARED)} for line in lines}


def on(world, **sizes: int) -> dict[str, Any]:
    """All roles on all ranks with these sizes; the engine keeps as much tensor parallelism."""
    return {**dict.fromkeys(("actor", "critic", "ref"), sizes), "rollout": {"tp": sizes.get("tp", 1)}}


def own_layout(size: int) -> dict[str, Any]:
    return {1: {}, 2: on(2, tp=2), 4: {**on(4, tp=2), "critic": {"pp": 2}, "rollout": {"tp": 1}}}[size]


def interrupted(world, lab: Lab, run: Path, name: str, *, saved: int, drawn: int, keep: float = 1.0) -> int:
    """A run killed while responses of step `drawn` were being generated, after the checkpoint of step `saved`: of each
    log it has this share. Gives how many responses those are."""
    count = 0
    if world.rank == 0:
        folder = lab.folder / name
        if saved:
            shutil.copytree(run / "checkpoints" / f"step_{saved:08d}", folder / "checkpoints" / f"step_{saved:08d}")
        (folder / "rollouts").mkdir(parents=True)
        for step, path in generation_logs(run / "rollouts"):
            records = list(read_records(path, pytest.fail))
            if step != drawn:
                continue
            log = RecordLog(folder / "rollouts" / path.name)
            for record in records[: int(keep * len(records))]:
                log.append(record)
                count += 1
            log.close()
    return world.broadcast_object(count)


def reused(run: Path, step: int) -> int:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(line.get("perf/rollouts_reused", 0) for line in lines if line["step"] == step)
