"""The claim of docs/extending/environment.md, measured: GRPO with rewards of turns lifts a game over its warm start.

    .venv/bin/python tools/game_seeds.py [key=value ...] [--seeds 0 1 2]

Draws data (tools/prepare_games.py), unless it is there; then runs SFT and GiGPO for each seed on one
rank (runs that are complete are not repeated); overrides that begin with sft. are SFT's, the others GiGPO's. Prints
tables of accuracy on 256 games (greedy, and of 4 samples), entropy and minutes, and writes
runs/game_seeds/GAME/curves.png. Takes 2 to 5 minutes per seed and game on one core.
"""

from seeds import Study

STUDIES = {
    game: Study(
        folder=f"runs/game_seeds/{game}",
        needs={f"data/games/{game}_train.parquet": "tools/prepare_games.py --out data/games"},
        sft=f"configs/games/{game}_sft.yaml",
        algorithms={"gigpo": f"configs/games/{game}.yaml"},
        tasks=(game,),
        ranks=1,
    )
    for game in ("grid_world",)
}

if __name__ == "__main__":
    for study in STUDIES.values():
        study.main(__doc__)
