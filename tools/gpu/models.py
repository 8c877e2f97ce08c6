"""The models whose speed is measured, by their templates, and small ones for rehearsals; the machine of forecasts.

`python -m tools.gpu.models NODES RANKS_PER_NODE GIB` prints the overrides of EIGHT for GPUs with so much memory.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

import torch

from hpcrl.config.loader import load_config
from hpcrl.config.schema import Config
from hpcrl.forecast.memory.fixes import tightest
from hpcrl.forecast.memory.memory import GIB, TrainingPlan
from hpcrl.forecast.memory.state import job_shape
from hpcrl.machine.machine_file import Machine, read_machine
from hpcrl.model.shape import ModelShape

DENSE, MIXTURE, LORA, EIGHT = (
    Path(__file__).with_name(f"{name}.yaml") for name in ("grpo_1_5b", "grpo_mixture", "lora_8b", "grpo_8b")
)
REHEARSAL = os.environ.get("HPCRL_GPU_REHEARSAL") == "1"
SMALL = (
    *("model.num_layers=2", "model.hidden_size=64", "model.ffn_hidden_size=128", "model.num_attention_heads=2"),
    *("model.num_query_groups=2", "model.head_dim=32", "model.vocab_size=512", "data.train_batch_size=4"),
    *("actor.ppo_mini_batch_size=4", "data.max_response_length=8", "rollout.kv_cache_gib=0.1"),
)
SMALL_EXPERTS = ("model.num_experts=4", "model.moe_ffn_hidden_size=32")


def rehearsed(template: Path) -> tuple[str, ...]:
    """What makes a job of a template small, in a rehearsal."""
    return (*SMALL, *SMALL_EXPERTS * (template == MIXTURE)) if REHEARSAL else ()


def config_of(template: Path, *overrides: str) -> Config:
    return load_config(template, [*overrides, *rehearsed(template)])


@cache
def shape_of(template: Path) -> ModelShape:
    return job_shape(config_of(template))


@cache
def machine() -> Machine:
    """As measured, in a file that HPCRL_GPU_MACHINE names and that is there; else the published figures of this GPU."""
    measured = os.environ.get("HPCRL_GPU_MACHINE", "")
    if os.path.isfile(measured):
        return read_machine(measured)
    is_h200 = torch.cuda.is_available() and "H200" in torch.cuda.get_device_name()
    return read_machine("h200_ib" if is_h200 else "dgx_h100")


PROMPTS = 8  # of each rank
TRAINED = ((), ("model.lora_rank=16",))  # the first that fits, else the last
FULL = 0.9  # of a GPU's memory that may be planned


def sized(nodes: int, per_node: int, gib: float) -> tuple[str, ...]:
    """Overrides of EIGHT, with as much tensor parallelism as four ranks of a node have."""
    heads = config_of(EIGHT).model.num_query_groups or 1
    tp = max(size for size in (1, 2, 4) if per_node % size == 0 and heads % size == 0)
    prompts = PROMPTS * nodes * per_node
    common = (
        *(f"job.nodes={nodes}", f"job.ntasks_per_node={per_node}", f"job.gpus_per_node={per_node}"),
        *(f"placement.actor.tp={tp}", f"placement.rollout.tp={tp}"),
        *(f"data.train_batch_size={prompts}", f"actor.ppo_mini_batch_size={prompts}"),
    )
    for trained in TRAINED:
        overrides = (*common, *trained, *rehearsed(EIGHT))
        if tightest(TrainingPlan(config_of(EIGHT, *overrides)).rows()).total <= FULL * gib * GIB:
            break
    return overrides


if __name__ == "__main__":
    print(*sized(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
