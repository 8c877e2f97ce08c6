"""The claim of docs/extending/environment.md, measured: GRPO with rewards of turns lifts a game over its warm start.

    .venv/bin/python tools/game_seeds.py [key=value ...] [--seeds 0 1 2]

Draws data (tools/prepare_games.py), unless it is there; then runs SFT and GiGPO for each seed on one rank (runs that
are complete are not repeated); overrides that begin with sft. are SFT's, the others GiGPO's. Prints a table of accuracy
on 256 games (greedy, and of 4 samples), entropy and minutes, and writes runs/game_seeds/curves.png.
Takes 2 to 5 minutes per seed on one core.
"""

from seeds import Study

STUDY = Study(
    folder="runs/game_seeds",
    needs={"data/games/grid_world_train.parquet": "tools/prepare_games.py --out data/games"},
    sft="configs/games/grid_world_sft.yaml",
    algorithms={"gigpo": "configs/games/grid_world.yaml"},
    tasks=("grid_world",),
    ranks=1,
)

if __name__ == "__main__":
    STUDY.main(__doc__)
