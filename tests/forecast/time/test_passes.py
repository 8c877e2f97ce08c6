"""Passes: their operations are those of `hpcrl.model.shape`, and pipelines take as long as a simulated one.

Loads of experts may be uneven.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hpcrl.forecast.time.cost import Cost, Network, Units
from hpcrl.forecast.time.passes import Micro, PassModel, Recompute, pipelined
from hpcrl.forecast.time.step import LOAD_METRIC, with_measured_load
from hpcrl.model.blocks.mixture import fullest_rank, most_of
from hpcrl.model.shape import Lora, ModelShape, forward_flops
from hpcrl.runtime.layout import Layout
from tests.forecast.memory.shapes import DEEPSEEK, MOE, SHAPE
from tests.forecast.time.machines import gpu
from tests.run.test_predicted import config

RATE = 8e14
FAST: dict[str, Any] = {
    "device__matmul": {"bfloat16": {"flops": RATE}},
    "device__attention": {"bfloat16": {"flops": RATE}},
    "device__memory_bandwidth": 1e30,
    "device__launch": 1e-30,
    "links__inside": {"latency": 0.0, "bandwidth": 1e30},
    "links__between": {"latency": 0.0, "bandwidth": 1e30},
}
LENGTH, OUTPUTS = 96, 56


def model(shape: ModelShape = SHAPE, ranks: int = 1, machine: Any = None, **fields: Any) -> PassModel:
    machine = machine or gpu(**FAST)
    layout = Layout(tuple(range(ranks)), **fields.pop("layout", {}))
    units = Units.of(machine.device, "bfloat16", 2)
    return PassModel(shape, layout, fields.pop("head", "lm"), units, units, Network.of(machine), 8, **fields)


def micro(count: int = 4, cp: int = 1) -> Micro:
    return Micro(count * LENGTH / cp, count * LENGTH * (LENGTH + 1) / 2 / cp, LENGTH, count * OUTPUTS / cp)


@pytest.mark.parametrize("shape", [SHAPE, MOE, DEEPSEEK], ids=["dense", "experts", "latent"])
@pytest.mark.parametrize(
    "sizes", [{}, {"tp": 2}, {"pp": 3}, {"tp": 2, "ep": 2, "pp": 2}, {"cp": 2}], ids=["1", "tp", "pp", "tp-ep-pp", "cp"]
)
def test_operations_are_those_of_the_model(shape: ModelShape, sizes: dict[str, int]) -> None:
    """Without latencies and with endless bandwidth, what is left are the operations, of all ranks together."""
    if not shape.num_experts:
        sizes = {axis: size for axis, size in sizes.items() if axis != "ep"}
    if shape.mla and "tp" in sizes:
        return  # projections to the latents are on every rank
    ranks = 1
    for axis, size in sizes.items():
        ranks *= size if axis != "ep" else 1
    built = model(shape, ranks, layout=sizes)
    cp = sizes.get("cp", 1)
    stages = built.forward(micro(cp=cp))
    seconds = sum(stage.seconds for stage in stages) * ranks / len(stages)
    waited = sum(stage.waiting for stage in stages) * ranks / len(stages)
    rel = 1e-2 if shape.num_experts and "tp" in sizes else 1e-6  # the router is on every tensor-parallel rank
    assert (seconds - waited) * RATE == pytest.approx(forward_flops(shape, [LENGTH] * 4, 4 * OUTPUTS), rel=rel)


def test_training_takes_three_products_and_recomputation_one_more() -> None:
    plain, forward = model(recomputes_head=False), model().forward(micro())[0]
    trained = plain.training(micro())[0]
    assert trained.products == pytest.approx(3 * forward.products)
    assert trained.attention == pytest.approx(3.5 * forward.attention)
    again = replace(plain, recompute=Recompute("full", "uniform", 1, ())).training(micro())[0]
    assert again.attention == pytest.approx(4.5 * forward.attention)
    part = replace(plain, recompute=Recompute("full", "block", 1, ())).training(micro())[0]
    assert part.attention == pytest.approx((3.5 + 1 / 5) * forward.attention)
    selective = replace(plain, recompute=Recompute("selective", "uniform", 1, ("core_attn",))).training(micro())[0]
    assert selective.products == pytest.approx(trained.products)
    assert selective.attention == pytest.approx(4.5 * forward.attention)
    adapted = replace(plain, lora=Lora(4, 8.0)).training(micro())[0]
    assert trained.products * 0.6 < adapted.products < 0.8 * trained.products


def test_sequence_parallelism_gathers_a_third_time() -> None:
    machine = gpu()
    shared = model(ranks=2, machine=machine, layout={"tp": 2})
    whole = replace(shared, sequence_parallel=False)
    nbytes = 4 * LENGTH * SHAPE.hidden_size * 2
    each = shared.network.all_gather(nbytes, shared.tp_group)
    layers = Cost(communication=SHAPE.num_layers * each)
    head = {key: built.forward(micro())[0].communication for key, built in ((1, shared), (0, whole))}
    ends = head[1] - 4 * layers.communication
    assert ends == pytest.approx(each + 3 * shared.network.all_reduce(4 * OUTPUTS * 4, shared.tp_group), rel=1e-6)
    assert shared.training(micro())[0].communication > 10 * layers.communication


def test_experts_have_the_collectives_of_their_layers() -> None:
    """An engine sums a layer's parts twice; where ranks share tokens, attention gathers and scatters, and tokens go to
    experts and back."""
    machine, shape = gpu(), replace(MOE, dense_layers=())
    nbytes = 4 * LENGTH * shape.hidden_size * 2

    def each_layer(built: PassModel) -> float:
        ends = built._ends(built.stages[0], micro(), trains=False)
        return (built.forward(micro())[0].communication - ends.communication) / shape.num_layers

    engine = model(shape, ranks=2, machine=machine, layout={"tp": 2, "etp": 2}, sequence_parallel=False)
    assert each_layer(engine) == pytest.approx(2 * engine.network.all_reduce(nbytes, engine.tp_group))
    trained = model(shape, ranks=2, machine=machine, layout={"tp": 2, "ep": 2})
    pair = 2 * trained.network.all_gather(nbytes, trained.tp_group)
    most = most_of(2, 4 * LENGTH * shape.moe_topk) / 2 * shape.moe_topk  # of a token's copies
    exchanged = 2 * trained.network.all_to_all(nbytes * most, trained.tp_group)
    exchanged += trained.network.all_to_all(4 * LENGTH * 4 * most, trained.tp_group)  # probabilities
    exchanged += trained.network.all_gather(8 * shape.num_experts * 2, trained.tp_group)  # numbers of tokens
    assert each_layer(trained) == pytest.approx(pair + exchanged)
    shared = replace(trained, shape=replace(shape, moe_shared_ffn_hidden_size=72))
    assert each_layer(shared) == pytest.approx(2 * pair + exchanged)


def simulated(stages: list[float], count: int) -> float:
    """Each stage runs a micro-batch when it has it and has ended the one before."""
    ends = [0.0] * len(stages)
    for _ in range(count):
        before = 0.0
        for number, seconds in enumerate(stages):
            before = ends[number] = max(before, ends[number]) + seconds
    return ends[-1]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_pipeline_takes_as_long_as_a_simulated_one(count: int) -> None:
    drawn = random.Random(count)
    for size in (1, 2, 5):
        seconds = [drawn.uniform(0.5, 2.0) for _ in range(size)]
        found = pipelined([Cost(products=it) for it in seconds], count)
        assert found.seconds == pytest.approx(simulated(seconds, count))


def test_the_bubble_of_narayanan() -> None:
    """(p - 1) / m of the time of m micro-batches, an v-th with v chunks; of one micro-batch, p - 1 times its own."""
    stages = [Cost(products=2.0)] * 4
    assert pipelined(stages, 8).bubble == pytest.approx(3 / 8 * 16.0)
    assert pipelined(stages, 8, vpp=3).bubble == pytest.approx(3 / 8 * 16.0 / 3)
    assert pipelined(stages, 1).seconds == 8.0
    assert pipelined(stages, 8, send=0.1).communication == pytest.approx(0.1 * (8 + 4 - 2))


def test_tokens_that_choose_at_random() -> None:
    assert most_of(1, 100) == 1.0
    assert 1.0 < most_of(8, 1e6) < most_of(8, 1e3) < most_of(8, 10) <= 8.0


@pytest.mark.parametrize(("num_experts", "ranks"), [(8, 2), (8, 4), (64, 8), (64, 64), (128, 16)])
def test_the_fullest_rank_is_that_of_drawn_loads(num_experts: int, ranks: int) -> None:
    loads = np.random.default_rng(0).normal(1.0, 0.2, (20_000, num_experts))
    loads /= loads.mean(1, keepdims=True)
    imbalance = loads.max(1).mean()
    of_ranks = loads.reshape(len(loads), ranks, -1).mean(2).max(1).mean()
    assert fullest_rank(ranks, num_experts, imbalance) - 1 == pytest.approx(of_ranks - 1, rel=0.06)


def test_the_fullest_rank_of_routers_as_initialised() -> None:
    """Counted in an optimizer step of the model of tools/bench/layouts.py: 2.36, 1.66 and 1.13; 2.69, 1.78 and 1.24."""
    for of_expert, of_four, of_two in ((2.36, 1.66, 1.13), (2.69, 1.78, 1.24)):
        assert fullest_rank(4, 8, of_expert) == pytest.approx(of_four, rel=0.15)
        assert fullest_rank(2, 8, of_expert) == pytest.approx(of_two, rel=0.15)
    assert fullest_rank(8, 8, 2.5) == pytest.approx(2.5) and fullest_rank(1, 8, 2.5) == 1.0
    assert fullest_rank(4, 8, 8.0) == 4.0, "one expert has all tokens"


def test_only_ranks_that_divide_experts_wait_for_the_fullest_one() -> None:
    for layout, waits in (({}, False), ({"ep": 2}, True)):
        even, uneven = (model(MOE, 2, layout=layout, load_imbalance=load).training(micro())[0] for load in (1.0, 2.0))
        assert (uneven.waiting > even.waiting) == waits
        assert uneven.products == pytest.approx(even.products)


def test_a_runs_load_is_that_of_its_metrics() -> None:
    assert with_measured_load(config(), {LOAD_METRIC: 1.84}).model.moe.load_imbalance == 1.8
    assert with_measured_load(config(), {LOAD_METRIC: 0.99}).model.moe.load_imbalance == 1.0
    assert with_measured_load(config(), {LOAD_METRIC: float("nan")}) == with_measured_load(config(), {}) == config()


def test_only_products_of_large_weights_are_8_bit() -> None:
    """At the width of Qwen2.5-1.5B those of the MLP; on a device that computes them at twice the rate."""
    shape = ModelShape(2, 1536, 8960, 12, 2, 128, 512)
    mlp = 3 * 1536 * 8960
    bf16 = model(shape)
    fp8 = replace(bf16, large_units=bf16.large_units._replace(flops=2 * bf16.units.flops))
    (slow,), (fast,) = (it.forward(micro()) for it in (bf16, fp8))
    saved = shape.num_layers * 2 * mlp * (micro().tokens + bf16.units.half_rows) / (2 * bf16.units.flops)
    assert slow.products - fast.products == pytest.approx(saved)
    assert slow.attention == fast.attention
