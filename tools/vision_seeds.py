"""The claim of docs/vision.md, measured: GRPO and PPO lift a small vision-language model over its supervised start.

    .venv/bin/python tools/vision_seeds.py [key=value ...] [--seeds 0 1 2] [--algorithms grpo ppo]

Writes a model with random weights and draws pictures, unless both are there; then runs SFT and each algorithm for every
seed under mpiexec (runs that are complete are not repeated); overrides that begin with sft. are SFT's, the others the
algorithms'. Prints a table of accuracy on 512 held-out pictures (greedy of each task; means over the tasks, greedy and
of 4 samples), entropy and minutes, and writes runs/vision_seeds/curves.png: means over seeds, with bands of one
standard deviation. Takes 7 minutes per seed on two idle cores.
"""

from seeds import Study

STUDY = Study(
    folder="runs/vision_seeds",
    needs={
        "models/tiny_vl/config.json": "tools/make_vision_model.py --out models/tiny_vl",
        "data/pictures/dataset.json": "-m hpcrl data pictures --out data/pictures --rows 12000 --val-rows 512",
    },
    sft="configs/vision/sft.yaml",
    algorithms={name: f"configs/vision/{name}.yaml" for name in ("grpo", "ppo")},
    tasks=("count_squares", "left_of", "maze", "two_digits"),
    curves=("--seeds", "--keys", "val-core/.*/acc/mean@1$|critic/score/mean$"),
)

if __name__ == "__main__":
    STUDY.main(__doc__)
