"""The models whose speed is measured, by their templates, and small ones for rehearsals; the machine of forecasts."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch

from hpcrl.config.loader import load_config
from hpcrl.config.schema import Config
from hpcrl.forecast.memory.state import job_shape
from hpcrl.machine.machine_file import Machine, read_machine
from hpcrl.model.shape import ModelShape

DENSE, MIXTURE, LORA = (Path(__file__).with_name(f"{name}.yaml") for name in ("grpo_1_5b", "grpo_mixture", "lora_8b"))
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
    """The published figures of this GPU."""
    is_h200 = torch.cuda.is_available() and "H200" in torch.cuda.get_device_name()
    return read_machine("h200_ib" if is_h200 else "dgx_h100")
