"""Small GRPO jobs: they end with finite numbers, resume as if uninterrupted, and compute the same with offload.

`python -m tools.gpu.runs FOUND EXPECTED` compares the metrics of two runs by their folders.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from hpcrl.runtime.world import World
from tests.mpi.lab import Lab, make_countdown_files, metrics
from tools.gpu.outcome import require

MODEL = {"hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 4}  # heads of 32, which kernels take
GRPO = {"adv_estimator": "grpo", "use_kl_in_reward": False}
OFFLOAD = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
GAP = {"float32": 1e-3, "bfloat16": 0.5}  # of the log-probs of rollout and training: logits are of about 10


def lab(world: World) -> Lab:
    folder = Path(world.broadcast_object(tempfile.mkdtemp() if world.rank == 0 else None))
    if world.rank == 0:
        make_countdown_files(folder)
    world.barrier()
    return Lab(world, folder, folder)


def run(lab: Lab, name: str, steps: int, **sections: dict[str, Any]) -> dict[int, dict[str, float]]:
    """The metrics of a job of the session's ranks, by step, without times and memory."""
    sections = {"model": MODEL, "algorithm": GRPO, **sections}
    sections["trainer"] = {"total_training_steps": steps, **sections.get("trainer", {})}
    return metrics(lab.run(name, **sections))


def grpo_fp32(world: World) -> str:
    return grpo(world, "float32")


def grpo_bf16(world: World) -> str:
    return grpo(world, "bfloat16")


def grpo(world: World, dtype: str) -> str:
    """Rollout in `dtype`, a reference, three steps; the engine has weights of its own, so that a refit moves them."""
    alone = {"checkpoint_engine": {"alias": False, "verify": "always"}}
    metrics_by_step = run(lab(world), "grpo", 3, model={**MODEL, "dtype": dtype}, rollout=alone)
    require(sorted(metrics_by_step) == [1, 2, 3], f"metrics of steps {sorted(metrics_by_step)}; expected 1, 2, 3")
    for step, line in metrics_by_step.items():
        wrong = [name for name, value in line.items() if not math.isfinite(value)]
        require(not wrong, f"step {step}: {', '.join(wrong)} are not finite")
        require(line["actor/grad_norm"] > 0, f"step {step}: the gradient is 0")
    gap = max(line["training/rollout_log_probs_diff_max"] for line in metrics_by_step.values())
    require(gap < GAP[dtype], f"log-probs of rollout and training differ by {gap:.1e}; expected less than {GAP[dtype]}")
    norms = ", ".join(f"{line['actor/grad_norm']:.3g}" for line in metrics_by_step.values())
    return f"gradient norms {norms}; log-probs of rollout and training differ by {gap:.1e} at most"


def resume(world: World) -> str:
    """Four steps are two, a save, and two more."""
    runs = lab(world)
    straight = run(runs, "straight", 4)
    run(runs, "halted", 2, trainer={"save_freq": 2})
    return same(run(runs, "halted", 4, trainer={"save_freq": 2}), straight)


def offload(world: World) -> str:
    runs = lab(world)
    return same(run(runs, "away", 2, actor=OFFLOAD, ref={"param_offload": True}), run(runs, "here", 2))


def same(found: dict[int, dict[str, float]], expected: dict[int, dict[str, float]]) -> str:
    require(sorted(found) == sorted(expected), f"steps {sorted(found)}; expected {sorted(expected)}")
    count = 0
    for step, line in expected.items():
        for name, value in line.items():
            equal = found[step][name] == value or math.isnan(value)
            require(equal, f"step {step}, {name}: {found[step][name]!r}; expected {value!r}")
            count += 1
    return f"{count} metrics of {len(expected)} steps are equal, bit for bit"


if __name__ == "__main__":
    print("pass:", same(*(metrics(Path(folder)) for folder in sys.argv[1:3])))
