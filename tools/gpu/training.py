"""The training engine's log-probs of what the native engine sampled are the native engine's, and a step moves them."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch

from hpcrl.batch.data_proto import DataProto, TensorBatch
from hpcrl.batch.ragged import Ragged
from hpcrl.config.schema import OptimConfig, TransformerEngineConfig
from hpcrl.engine.engine import TrainEngine
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.protocol import Request, SamplingParams
from hpcrl.runtime.groups import make_groups
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.world import World
from tools.gpu.native import load
from tools.gpu.outcome import Skip, require
from tools.gpu.weights import SHAPE

REQUESTS = [Request([1 + index, 7, 30 + index], f"p{index}") for index in range(16)]
RESPONSE = 48
GAP = {
    torch.float32: 1e-3,
    torch.bfloat16: 5e-2,
}  # of log-probs; those of bf16 are of about 7, to 2^-8 of logits below 1


def fp32(world: World) -> str:
    return trained(world, torch.float32)


def bf16(world: World) -> str:
    return trained(world, torch.bfloat16)


def transformer_engine(world: World) -> str:
    if importlib.util.find_spec("transformer_engine") is None:
        raise Skip("transformer_engine is not installed")
    return trained(world, torch.float32, TransformerEngineConfig(enable=True))


def trained(world: World, dtype: torch.dtype, te: TransformerEngineConfig | None = None, *, exact: bool = False) -> str:
    groups = make_groups({"actor": Layout((world.rank,))}, world.rank)["actor"]
    te = te or TransformerEngineConfig(enable=False)
    engine = TrainEngine(SHAPE, groups, dtype=dtype, optim=OptimConfig(lr=1e-3), total_steps=2, te=te, exact=exact)
    limits: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 64}
    native = NativeEngine(SHAPE, None, 0, 1, dtype, **limits, exact=exact, device=world.device)
    load(native, engine.named_shards())
    native.wake()
    drawn = native.generate(REQUESTS, SamplingParams(RESPONSE, temperature=1.0), seed=0, step=0)
    rows = [[*request.prompt_ids, *one.token_ids] for request, one in zip(REQUESTS, drawn, strict=True)]
    lengths = [len(one.token_ids) for one in drawn]
    batch = DataProto(
        {
            "input_ids": Ragged.from_rows(rows, np.int32),
            "response_mask": Ragged.from_lengths(np.ones(sum(lengths), np.float32), lengths),
        }
    )
    sizes = {"max_tokens": 512, "temperature": 1.0}
    before = engine.log_probs(batch, **sizes)["log_probs"].values
    gap = float(np.abs(before - np.concatenate([one.log_probs for one in drawn])).max())
    most = 0.0 if exact else GAP[dtype]
    require(gap <= most, f"log-probs of training and rollout differ by {gap:.1e}; expected at most {most:.0e}")

    def loss(outputs: dict[str, torch.Tensor], part: TensorBatch) -> tuple[torch.Tensor, dict]:
        return -(outputs["log_probs"] * part.padded("response_mask")).sum() / len(before), {}

    norm = engine.train(batch, loss=loss, **sizes)["grad_norm"]
    after = engine.log_probs(batch, **sizes)["log_probs"].values
    moved = float(after.mean() - before.mean())
    line = (
        f"log-probs equal the rollout's to {gap:.1e}; a step (gradient norm {norm:.2g}) lowers the loss by {moved:.1e}"
    )
    require(moved > 0, f"{line}; expected more than 0")
    return line
