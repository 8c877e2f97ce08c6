"""A PPO job of a few short steps that has every phase, and what is compared of two runs of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests import preloaded
from tests.run.small_run import MODEL, NOT_COMPARED, write_rows
from tests.runtime.conftest import REPOSITORY
from tests.slurm.conftest import Lab

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=small_ppo --nodes=2 --ntasks-per-node=2 --time=60
#SBATCH --signal=URG@30 --requeue --open-mode=append --output=job.out
source "$REPOSITORY/slurm/common.sh" || exit
hpcrl_start
hpcrl_srun "runs/$1" train job.yaml run.name="$@"
hpcrl_leave $?
"""


def write_job(folder: Path, **sections: Mapping[str, Any]) -> Path:
    """job.yaml and job.sbatch in `folder`; `sbatch job.sbatch NAME [key=value ...]` runs it on 2 nodes, 4 ranks."""
    write_rows(folder / "rows.jsonl")
    config: dict[str, Any] = {
        "run": {"dir": "runs", "plugins": [str(Path(__file__).with_name("held_job.py"))]},
        "model": MODEL,
        "placement": {"actor": {"tp": 2}, "ref": {"tp": 2}, "critic": {"pp": 2}, "rollout": {"tp": 1}},
        "data": {
            "train_files": ["rows.jsonl"],
            "val_files": ["rows.jsonl"],
            "train_batch_size": 8,
            "max_prompt_length": 16,
            "max_response_length": 8,
        },
        "rollout": {"n": 2},
        "actor": {"ppo_mini_batch_size": 4, "ppo_max_token_len_per_gpu": 128, "optim": {"lr": 1e-3}},
        "critic": {"optim": {"lr": 1e-3}},
        "algorithm": {"adv_estimator": "gae", "use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive"}},
        "trainer": {"total_training_steps": 12, "test_freq": 1, "save_freq": 1, "walltime_margin": 5.0},
    }
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section}
    (folder / "job.yaml").write_text(yaml.safe_dump(config))
    script = folder / "job.sbatch"
    script.write_text(SCRIPT)
    return script


def of_ranks(ranks: int) -> list[str]:
    """What `sbatch` is told for a job on 2 or 4 ranks."""
    return [f"--ntasks-per-node={ranks // 2}"]


def environment(lab: Lab, folder: Path) -> Lab:
    """The lab for jobs of `folder`: what their scripts expect of the environment that they are submitted from."""
    hold = folder / "hold"
    hold.mkdir(exist_ok=True)
    more = {"REPOSITORY": REPOSITORY, "PYTHONPATH": REPOSITORY, "HOLD_FOLDER": hold}
    more |= {"HPCRL_VENV": preloaded.environment(folder / "venv"), "HPCRL_TEST_SERVER": preloaded.server()}
    return Lab(lab.folder, lab.env | {name: str(value) for name, value in more.items()})


# Every phase of a step by its method, and what the step of such a command is, where that is not the trainer's.
PHASES = (
    *("generate", "score", "compute_log_prob", "compute_values", "compute_advantage", "update_critic", "update_actor"),
    *("update_weights", "write", "generate.val", "begin_save"),
)
OF_REPLICAS = (
    "compute_advantage",
    "write",
)  # the first rank of each replica of the actor runs them, all others run everywhere
# Each phase is interrupted in CI by a kill or by a stop, and under --exhaustive by both.
KILLED_IN = ("generate", "compute_log_prob", "compute_advantage", "update_actor", "generate.val", "begin_save")
STOPPED_IN = ("generate", "score", "compute_values", "update_critic", "update_weights", "write", "generate.val")
OTHER_STEP = {"update_weights": "any", "begin_save": "any", "generate.val": "0"}


def places(folder: Path, phases: Sequence[str]) -> list[Path]:
    """One file to hold a rank by for each phase; those of the n-th one in step n, so that each step has one."""
    return [folder / "hold" / f"{OTHER_STEP.get(phase, index + 1)}.{phase}" for index, phase in enumerate(phases)]


def rank_for(place: Path, number: int, ranks: int) -> int:
    """One of the ranks that come to the place."""
    coming = range(0, ranks, 2 if place.name.split(".")[1] in OF_REPLICAS else 1)
    return coming[number % len(coming)]


def hold(lab: Lab, job: str, place: Path, rank: int) -> int:
    """Waits until that rank is held at that place; gives its process id."""
    place.write_text(str(rank))
    lab.until(lambda: place.read_text().startswith("held"), f"at {place.name}", job)
    return int(place.read_text().split(".")[1])


def lines(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what may differ between equal runs."""
    text = (run / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith(NOT_COMPARED)} for line in text
    ]


def largest_difference(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> float:
    """Over all metrics of all steps, which have to be the same ones; relative where a value is above 1."""
    assert [sorted(line) for line in a] == [sorted(line) for line in b]
    pairs = [(one[key], two[key]) for one, two in zip(a, b, strict=True) for key in one]
    assert all((x is None) == (y is None) for x, y in pairs)
    differences = [abs(x - y) / max(1.0, abs(x)) for x, y in pairs if x is not None]
    return max(differences, default=math.inf)
