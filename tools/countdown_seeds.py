"""The claim of docs/performance.md, measured: PPO and GRPO lift countdown accuracy over the warm start, for some seeds.

    .venv/bin/python tools/countdown_seeds.py [key=value ...] [--seeds 0 1 2] [--algorithms ppo grpo]

`one_step_off` and `bounded_staleness` are GRPO in the asynchronous modes.

Runs SFT and then each algorithm for every seed under mpiexec (runs that are complete are not repeated); overrides that
begin with sft. are SFT's, the others the algorithm's. Prints a table and writes runs/seeds/curves.png. Takes 3 to 12
minutes per seed on two cores.
"""

from seeds import Study

STUDY = Study(
    folder="runs/seeds",
    needs={
        "data/countdown/train.parquet": "tools/prepare_countdown.py --out data/countdown",
    },
    sft="configs/sft_countdown_cpu.yaml",
    algorithms={
        **{name: f"configs/{name}_countdown_cpu.yaml" for name in ("ppo", "grpo", "one_step_off")},
        "bounded_staleness": "configs/async_countdown_cpu.yaml",
    },
    tasks=("countdown",),
    curves=(),
    ranks=4,
)

if __name__ == "__main__":
    STUDY.main(__doc__)
