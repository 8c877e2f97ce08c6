"""The native engine on a GPU against itself on the CPU, where tests compare it with training."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.protocol import Completion, Request, SamplingParams
from hpcrl.runtime.world import World
from tools.gpu.outcome import require
from tools.gpu.weights import SHAPE, whole_weights

REQUESTS = [Request([1 + index, 7, 30 + index], f"p{index}") for index in range(16)]
GREEDY = SamplingParams(48, temperature=0.0)


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
