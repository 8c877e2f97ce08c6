"""The models whose speed is measured, by their templates, and small ones for rehearsals; the machine of forecasts;
random weights that are the same on every rank, the parts of them that ranks hold, and weights for timing only.

`python -m tools.gpu.models NODES RANKS_PER_NODE GIB` prints the overrides of EIGHT for GPUs with so much memory.
"""

from __future__ import annotations

import math
import os
import sys
from functools import cache
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from hpcrl.config.loader import load_config
from hpcrl.config.schema import Config
from hpcrl.forecast.memory.fixes import tightest
from hpcrl.forecast.memory.memory import GIB, TrainingPlan
from hpcrl.forecast.memory.state import job_shape
from hpcrl.machine.machine_file import Machine, read_machine
from hpcrl.model import build
from hpcrl.model.params import Shard, shards
from hpcrl.model.shape import ModelShape
from hpcrl.runtime import platform
from hpcrl.runtime.layout import Layout

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


SHAPE = ModelShape(
    num_layers=4,
    hidden_size=256,
    ffn_hidden_size=512,
    num_attention_heads=8,
    num_query_groups=4,
    head_dim=32,
    vocab_size=1000,
)


def whole_weights(shape: ModelShape, seed: int = 0) -> dict[str, Tensor]:
    """Tensors under Megatron's global names, fp32 on the host; norms are 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        shard.name: 0.02 * torch.randn(shard.global_shape, generator=generator)
        if len(shard.global_shape) > 1
        else torch.ones(shard.global_shape)
        for shard in shards(shape)
    }


def held(
    shape: ModelShape, whole: dict[str, Tensor], layout: Layout, rank: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """What `rank` trains under `layout`, by global names; nothing where it has no part in it."""
    if rank not in layout:
        return {}
    table = shards(shape, layout, rank)
    return {shard.name: cut(whole[shard.name], shard).to(device, dtype) for shard in table}


def cut(whole: Tensor, shard: Shard) -> Tensor:
    """A rank's part of a parameter."""
    local = torch.zeros(shard.local_shape)
    source, target = whole.reshape(len(whole), -1), local.view(len(local), -1)
    for box in shard.boxes:
        (top, bottom), (left, right) = box.global_rows, box.global_cols
        part = target[box.local_row : box.local_row + bottom - top, box.local_col : box.local_col + right - left]
        part.copy_(source[top:bottom, left:right])
    return local


initial_weight = build.initial_weight
FEW = 16  # rows


def draw_on_the_device() -> None:
    """Have models of this process drawn by `on_the_device` from now on: the CPU draws 62 million numbers per second,
    those of 8 B weights in two minutes."""
    build.initial_weight = on_the_device


def on_the_device(
    shape: ModelShape, name: str, global_shape: tuple[int, ...], seed: int, initial: float | None = None
) -> Tensor:
    """As `hpcrl.model.build.initial_weight`, but other numbers of the same deviation, on this process's device: the
    same on all ranks."""
    few = initial_weight(shape, name, (min(FEW, global_shape[0]), *global_shape[1:]), seed, initial)
    if few.numel() == math.prod(global_shape):
        return few
    if few.min() == few.max():
        return torch.full(global_shape, float(few.flatten()[0]))
    torch.manual_seed(crc32(name.encode(), seed))
    return torch.empty(global_shape, device=platform.device()).normal_(0.0, float(few.std()))


if __name__ == "__main__":
    print(*sized(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
