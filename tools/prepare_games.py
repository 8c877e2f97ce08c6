"""Writes data for configs/environments/grid_world.py: `python tools/prepare_games.py --out data/games`.

A file of rows for RL and one for validation, whose games are drawn from the row and the run's seed, and a file of games
for the warm start, in which most moves are random.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from hpcrl.api import Environment, Turn
from hpcrl.rollout.environments.environment import load_environment

NAME = "grid_world"
FILE = Path(__file__).parents[1] / "configs" / "environments" / f"{NAME}.py"
MAX_SEED = 2**31
GOOD_SHARE = 0.25  # of the moves of the warm start; the others are random


def move(game: Any, rng: random.Random) -> str:
    """A step towards the place, or any."""
    towards = [way[0] for way in game.direction().split()]
    return rng.choice(towards if rng.random() < GOOD_SHARE else "nswe")


def played(game: Environment, rng: random.Random) -> list[dict[str, str]]:
    """The messages of a game."""
    row = prompt()
    messages = [*row, *game.reset({"prompt": row}, rng.randrange(MAX_SEED))]
    done = False
    while not done:
        text = move(game, rng)
        answers, done, *_ = game.step(Turn(text))
        messages += [{"role": "assistant", "content": text}, *([] if done else answers)]
    return messages


def prompt() -> list[dict[str, str]]:
    return [{"role": "system", "content": "Play."}]


def row(index: int, split: str) -> dict[str, Any]:
    truth = {"style": "rule", "ground_truth": ""}
    info = {"index": index, "split": split}
    return {"data_source": NAME, "prompt": prompt(), "ability": "game", "reward_model": truth, "extra_info": info}


def main() -> None:
    import pyarrow
    import pyarrow.parquet

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("data/games"), help="folder to write")
    parser.add_argument("--rows", type=int, default=8192, help="rows for RL, and games of the warm start")
    parser.add_argument("--val-rows", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0, help="of the games of the warm start")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"{NAME} {args.seed}")
    kind: Any = load_environment(str(FILE), "GridWorld")
    rows = {
        "train": [row(index, "train") for index in range(args.rows)],
        "val": [row(index, "val") for index in range(args.val_rows)],
        "sft": [row(i, "sft") | {"messages": played(kind(side=4, steps=6), rng)} for i in range(args.rows)],
    }
    for split, rows_of_split in rows.items():
        path = args.out / f"{NAME}_{split}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows_of_split), path)
        print(f"{path}: {len(rows_of_split)} rows")


if __name__ == "__main__":
    main()
