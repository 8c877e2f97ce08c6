"""The native engine on a GPU against itself on the CPU, where tests compare it with training; the training engine's
log-probs of what the native engine sampled, which are its own, and a step that moves them.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcrl.batch.data_proto import DataProto, TensorBatch
from hpcrl.batch.ragged import Ragged
from hpcrl.config.schema import OptimConfig, TransformerEngineConfig
from hpcrl.engine.engine import TrainEngine
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.protocol import Completion, Request, SamplingParams
from hpcrl.runtime.groups import make_groups
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.world import World
from tools.gpu.models import SHAPE, whole_weights
from tools.gpu.outcome import Skip, require

REQUESTS = [Request([1 + index, 7, 30 + index], f"p{index}") for index in range(16)]
RESPONSE = 48
GREEDY = SamplingParams(RESPONSE, temperature=0.0)
GAP = {
    torch.float32: 1e-3,
    torch.bfloat16: 5e-2,
}  # of log-probs; those of bf16 are of about 7, to 2^-8 of logits below 1


def eager(world: World) -> str:
    return close(generate(made(world.device, enforce_eager=True)), on_the_cpu())


def graphs(world: World) -> str:
    """Generate, sleep, wake, generate: the second generation captures its graphs again, and is the first."""
    engine = made(world.device, enforce_eager=False)
    first = generate(engine)
    line = close(first, on_the_cpu())
    engine.sleep()
    engine.wake()
    for one, other in zip(first, generate(engine), strict=True):
        same = list(one.token_ids) == list(other.token_ids)
        gap = float(abs(one.log_probs - other.log_probs).max()) if same else 0.0
        require(same and gap == 0.0, f"after sleep and wake tokens are equal: {same}, log-probs differ by {gap:.1e}")
    captured = None if engine._paged is None else engine._paged._graphs
    require(world.device.type != "cuda" or captured is not None, "no CUDA graphs were used; expected some")
    number = "no graphs on this device" if captured is None else f"{len(captured._graphs)} graphs"
    return f"{line}; the same after sleep and wake ({number})"


def on_the_cpu() -> list[Completion]:
    return generate(made(torch.device("cpu"), enforce_eager=True))


def made(device: torch.device, *, enforce_eager: bool, dtype: torch.dtype = torch.float32) -> NativeEngine:
    """With the same weights each time, awake."""
    engine = NativeEngine(
        SHAPE,
        None,
        0,
        1,
        dtype,
        max_num_seqs=8,  # half of the requests, so that rows are freed and taken again
        max_num_batched_tokens=256,
        max_model_len=64,
        enforce_eager=enforce_eager,
        device=device,
    )
    load(engine, whole_weights(SHAPE))
    engine.wake()
    return engine


def load(engine: NativeEngine, weights: dict[str, Tensor]) -> None:
    with torch.no_grad(), engine.updating_weights():
        for name, weight in engine.weights().items():
            weight.copy_(weights[name])


def generate(engine: NativeEngine) -> list[Completion]:
    return engine.generate(REQUESTS, GREEDY, seed=0, step=0)


def close(found: list[Completion], expected: list[Completion]) -> str:
    """Greedy tokens are equal up to where two logits are, and their log-probs to 1e-3."""
    worst, shared, total = 0.0, 0, 0
    for ours, theirs in zip(found, expected, strict=True):
        pairs = zip(ours.token_ids, theirs.token_ids, strict=True)
        equal = next((place for place, (one, other) in enumerate(pairs) if one != other), len(ours.token_ids))
        shared, total = shared + equal, total + len(ours.token_ids)
        if equal:
            worst = max(worst, float(abs(ours.log_probs[:equal] - theirs.log_probs[:equal]).max()))
    line = f"{shared} of {total} greedy tokens equal, their log-probs to {worst:.1e}"
    require(shared > 0.9 * total and worst < 1e-3, f"{line}; expected more than 90% and 1e-3")
    return line


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
