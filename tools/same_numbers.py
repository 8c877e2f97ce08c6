"""Prove that a refactoring keeps every number: run small jobs with two checkouts, and compare metrics bit for bit.

    python tools/same_numbers.py record CHECKOUT OUT.json [NAME ...]      # a checkout with its .venv
    python tools/same_numbers.py compare BEFORE.json AFTER.json

The jobs are five steps of every configs/*_cpu.yaml on small batches, on 2 ranks, or 4 where a template has pools of its
own; and PPO stopped after three steps, then resumed. Metrics that are a time or a size are left out, and so is
`bounded_staleness`, which depends on timing. Record both checkouts on one machine. About 10 s a job.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

LEFT_OUT = (
    "timing_s/",
    "timing_per_token_ms/",
    "perf/",
    "memory/",
    "fully_async/trainer/idle",
    "fully_async/rollouter/idle",
)
FOUR_RANKS = ("one_step_off_countdown_cpu", "ppo_countdown_cpu")
BY_TIMING = ("async_countdown_cpu",)
STEPS = 5
# An untrained model answers nothing right: here the samples of a prompt differ all the same.
SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    kind = sum(map(ord, solution_str)) % 7
    return {"score": kind / 7, "acc": float(kind > 3), "format": float(kind % 2)}
"""
SMALL = {
    "sft": ["sft.batch_size=8", "sft.eval_freq=3", "sft.eval_samples=8", f"sft.total_training_steps={STEPS}"],
    "rm": ["rm.batch_size=8", "rm.eval_freq=3", "rm.eval_samples=8", f"rm.total_training_steps={STEPS}"],
    "train": ["trainer.test_freq=3", "trainer.val_before_train=true", "actor.ppo_mini_batch_size=2"],
}
EVERY = [
    *("data.train_max_samples=64", "data.val_max_samples=8", "data.train_batch_size=4", "trainer.save_freq=5"),
    *("reward.custom_reward_function.path=score.py", "reward.num_workers=1"),
]


class Job(NamedTuple):
    name: str
    command: str
    template: str
    ranks: int
    overrides: tuple[str, ...]
    run: str  # folder in runs/


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("record", help="run the jobs of a checkout")
    command.add_argument("checkout", type=Path)
    command.add_argument("out", type=Path)
    command.add_argument("names", nargs="*", help="jobs; all if none is given")
    command = commands.add_parser("compare", help="compare two recordings")
    command.add_argument("before", type=Path)
    command.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "record":
        return record(arguments.checkout.resolve(), arguments.out, arguments.names)
    return compare(json.loads(arguments.before.read_text()), json.loads(arguments.after.read_text()))


def jobs(configs: Path) -> list[Job]:
    """Warm starts first, then PPO, because other jobs begin with their weights."""
    jobs_of_templates = []
    for path in sorted(
        configs.glob("*_cpu.yaml"),
        key=lambda path: (not path.name.startswith(("sft", "rm")), not path.name.startswith("ppo_"), path.name),
    ):
        name, kind = path.stem, path.stem.split("_")[0]
        if name in BY_TIMING:
            continue
        command = kind if kind in ("sft", "rm") else "train"
        last = [f"trainer.total_training_steps={STEPS}"] if command == "train" else []
        ranks = 4 if name in FOUR_RANKS else 2
        run = name.removesuffix("_cpu")
        jobs_of_templates.append(Job(name, command, name, ranks, (*EVERY, *SMALL[command], *last), run))
    base = (*EVERY, *SMALL["train"], "run.name=resumed", "trainer.save_freq=3", "critic.ppo_mini_batch_size=4")
    for name, steps in (("stopped", 3), ("resumed", STEPS)):
        overrides = (*base, f"trainer.total_training_steps={steps}")
        jobs_of_templates.append(Job(name, "train", "ppo_countdown_cpu", 2, overrides, "resumed"))
    return jobs_of_templates


def record(checkout: Path, out: Path, names: list[str]) -> int:
    results = {}
    chosen = jobs(checkout / "configs")
    selected = [job for job in chosen if not names or job.name in names or job.command in ("sft", "rm")]
    with tempfile.TemporaryDirectory(prefix="same_") as folder:
        work = Path(folder)
        (work / "configs").symlink_to(checkout / "configs")
        (work / "score.py").write_text(SCORE)
        python = checkout / ".venv" / "bin" / "python"
        environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        prepare = [str(python), str(checkout / "tools" / "prepare_countdown.py"), "--out", "data/countdown"]
        subprocess.run(prepare, cwd=work, env=environment, check=True, stdout=subprocess.DEVNULL)
        for job in selected:
            start = time.monotonic()
            line = [str(python.with_name("mpiexec")), "-n", str(job.ranks), str(python), "-m", "hpcrl", job.command]
            line += [f"configs/{job.template}.yaml", *job.overrides]
            ended = subprocess.run(line, cwd=work, env=environment, capture_output=True, text=True)
            said = (ended.stdout + ended.stderr).strip().splitlines()
            print(f"{job.name}: exit code {ended.returncode}, {time.monotonic() - start:.0f} s", flush=True)
            if ended.returncode:
                print("\n".join(said[-5:]))
            results[job.name] = {"code": ended.returncode, "metrics": metrics(work / "runs" / job.run)}
            out.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(result["code"] for result in results.values()))


def metrics(run: Path) -> list[dict[str, float | None]]:
    """Lines of metrics.jsonl without times and sizes; JSON keeps every bit of a float."""
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{name: value for name, value in line.items() if not name.startswith(LEFT_OUT)} for line in lines]


def compare(before: dict, after: dict) -> int:
    different = 0
    for name in before.keys() & after.keys():
        old, new = before[name], after[name]
        if old == new and old["metrics"]:
            continue
        different += 1
        print(f"{name}: exit codes {old['code']}, {new['code']}; lines {len(old['metrics'])}, {len(new['metrics'])}")
        for one, other in zip(old["metrics"], new["metrics"], strict=False):
            names = sorted(key for key in one.keys() | other.keys() if one.get(key, "-") != other.get(key, "-"))
            shown = ", ".join(f"{key} {one.get(key, '-')} {other.get(key, '-')}" for key in names[:4])
            if names:
                print(f"  step {one.get('step')}: {len(names)} differ: {shown}")
    count = sum(len(line) for result in after.values() for line in result["metrics"])
    print(f"{len(before.keys() & after.keys())} jobs, {count} numbers; {different} jobs differ")
    for name in sorted(before.keys() ^ after.keys()):
        print(f"only in one recording: {name}")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
