"""The claim of docs/performance.md, measured: PPO and GRPO lift countdown accuracy over the warm start, for some seeds.

    .venv/bin/python tools/countdown_seeds.py [key=value ...] [--seeds 0 1 2] [--algorithms ppo grpo]

Runs SFT and then each algorithm for every seed under mpiexec (runs that are complete are not repeated); overrides that
begin with sft. are SFT's, the others the algorithm's. Prints a table and writes runs/seeds/curves.png. Takes 3 to 12
minutes per seed on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
RUNS = "run.dir=runs/seeds"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="key=value, for each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algorithms", nargs="+", default=["ppo", "grpo"], choices=["ppo", "grpo"])
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    if not (ROOT / "data/countdown/train.parquet").exists():
        subprocess.run([sys.executable, "tools/prepare_countdown.py", "--out", "data/countdown"], cwd=ROOT, check=True)
    gains: dict[str, list[tuple[float, float]]] = {name: [] for name in options.algorithms}
    rows, runs = [], []
    of_sft = [override for override in options.overrides if override.startswith("sft.")]
    of_algorithms = [override for override in options.overrides if override not in of_sft]
    for seed in options.seeds:
        start = f"sft_{seed}"
        launch(
            options.ranks,
            "sft",
            "configs/sft_countdown_cpu.yaml",
            f"run.name={start}",
            f"run.seed={seed}",
            RUNS,
            *of_sft,
        )
        for name in options.algorithms:
            run = f"{name}_{seed}"
            overrides = [f"run.name={run}", f"run.seed={seed}", f"model.init_from=runs/seeds/{start}", RUNS]
            launch(options.ranks, "train", f"configs/{name}_countdown_cpu.yaml", *overrides, *of_algorithms)
            before, after, seconds = outcome(ROOT / "runs/seeds" / run)
            gains[name].append((after[0] - before[0], after[1] - before[1]))
            rows.append((name, seed, before, after, seconds))
            runs.append(str(ROOT / "runs/seeds" / run))
    print("\nalgorithm  seed   greedy before -> after    sampled before -> after   seconds of steps")
    for name, seed, before, after, seconds in rows:
        greedy, sampled = (f"{100 * before[i]:5.1f}% -> {100 * after[i]:5.1f}%" for i in (0, 1))
        change = [100 * (after[i] - before[i]) for i in (0, 1)]
        print(f"{name:9}  {seed:4}   {greedy} {change[0]:+6.1f}   {sampled} {change[1]:+6.1f}   {seconds:6.0f}")
    for name, found in gains.items():
        for label, values in (("greedy", [gain[0] for gain in found]), ("sampled", [gain[1] for gain in found])):
            print(f"{name} {label}: minimum {100 * min(values):+.1f}, mean {100 * mean(values):+.1f} points")
    subprocess.run(
        [sys.executable, "-m", "hpcrl.telemetry.curves", *runs, "--out", "runs/seeds/curves.png"],
        cwd=ROOT,
        check=True,
    )


def launch(ranks: int, *arguments: str) -> None:
    print("hpcrl", *arguments, flush=True)
    subprocess.run([BIN / "mpiexec", "-n", str(ranks), sys.executable, "-m", "hpcrl", *arguments], cwd=ROOT, check=True)


def lines_of(run: Path) -> list[dict[str, float]]:
    """The metrics of each step."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def outcome(run: Path, source: str = "countdown") -> tuple[tuple[float, float], tuple[float, float], float]:
    """(greedy, sampled) accuracy before and after, and the seconds of all training steps."""
    greedy, sampled = (f"val-core/{source}/acc/mean@{n}" for n in (1, 4))
    lines = lines_of(run)
    tested = [(line[greedy], line[sampled]) for line in lines if greedy in line]
    return tested[0], tested[-1], seconds(lines)


def seconds(lines: list[dict[str, float]]) -> float:
    return sum(line["timing_s/step"] for line in lines if line["step"] > 0)


if __name__ == "__main__":
    main()
