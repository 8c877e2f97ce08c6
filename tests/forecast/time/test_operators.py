"""The counted operators are those that engines run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from hpcrl.config.schema import OptimConfig
from hpcrl.forecast.memory.state import RoleModel
from hpcrl.forecast.time.passes import ENGINE, FORWARD, TRAINING, Operators
from hpcrl.forecast.time.samples import OPTIMIZER_OPERATORS
from hpcrl.machine.measure_rank import CountOperators
from hpcrl.model.blocks.micro_batch import MicroBatch
from hpcrl.model.params import Head
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.protocol import Request, SamplingParams
from hpcrl.runtime.groups import fake_rank
from hpcrl.runtime.layout import Layout
from tests.forecast.memory.passes import LENGTH, SAMPLES, loss, make_batch
from tests.forecast.memory.shapes import DELTA, HYBRID, MOE, SHAPE
from tests.forecast.memory.test_memory import make_engine
from tests.rollout.small_model import draw_weights

LAYOUTS = {"one": Layout((0,)), "tp2": Layout((0, 1), tp=2), "cp2": Layout((0, 1), cp=2)}
NEAR = 0.25  # backward passes of some widths have a sixth more, context parallelism fewer where no sequence is cut


def counted(call: Callable[[], object]) -> int:
    call()
    with CountOperators() as count:
        call()
    return count.operators


def expected(operators: Operators, model: RoleModel) -> float:
    """Of one micro-batch."""
    layout, batch = model.layout, MicroBatch(model.layout, SAMPLES * LENGTH, model.itemsize, on_gpu=False)
    layers = ([block.computation(batch) for block in layer.blocks] for layer in model.shape.layers)
    of_layers = sum(operators.of_layer(layer, layout) for layer in layers)
    return operators.of_batch(layout) + operators.of_head(model.head) + of_layers


@pytest.mark.parametrize(
    "shape, layout, head",
    [
        (SHAPE, "one", "lm"),
        (SHAPE, "one", "value"),
        (SHAPE, "tp2", "lm"),
        (SHAPE, "cp2", "lm"),
        (MOE, "one", "lm"),
        (DELTA, "one", "lm"),
        (HYBRID, "one", "lm"),
    ],
)
def test_passes_run_as_many(shape: ModelShape, layout: str, head: Head) -> None:
    model = RoleModel(shape, LAYOUTS[layout], head, 4, OptimConfig(lr=1e-3))
    batch, budget = make_batch(), SAMPLES * LENGTH
    with fake_rank(model.layout, 0) as groups:
        engine = make_engine(model, groups)
        trained = counted(lambda: engine.train(batch, max_tokens=budget, loss=loss))
        if head == "lm":
            passed = counted(lambda: engine.log_probs(batch, max_tokens=budget, temperature=1.0))
        else:
            passed = counted(lambda: engine.values(batch, max_tokens=budget))
    assert passed == pytest.approx(expected(FORWARD, model), rel=NEAR)
    assert trained == pytest.approx(expected(TRAINING, model) + OPTIMIZER_OPERATORS, rel=NEAR)


@pytest.mark.parametrize(
    "shape", [SHAPE, replace(MOE, dense_layers=()), DELTA, HYBRID], ids=["dense", "experts", "delta", "hybrid"]
)
def test_a_decode_step_runs_as_many(shape: ModelShape) -> None:
    engine = NativeEngine(shape, None, 0, 1, torch.float32, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64)
    draw_weights(engine, 0)

    def generate(tokens: int) -> None:
        requests = [Request(np.arange(1, 9), f"prompt {number}", max_new_tokens=tokens) for number in range(8)]
        engine.generate(requests, SamplingParams(tokens, ignore_eos=True), seed=0, step=1)

    of_step = (counted(lambda: generate(24)) - counted(lambda: generate(4))) / 20
    model = RoleModel(shape, LAYOUTS["one"], "lm", 4)
    assert of_step == pytest.approx(expected(ENGINE, model), rel=NEAR)
