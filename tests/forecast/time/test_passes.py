"""Passes: their operations are those of `hpcrl.model.shape`, and pipelines take as long as a simulated one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from hpcrl.forecast.time.collectives import Network
from hpcrl.forecast.time.cost import Cost, Units
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.passes import Micro, PassModel, Recompute, pipelined
from hpcrl.forecast.time.training import Optimizer, Passes, Update, forward_cost, imbalance, packing, update_cost
from hpcrl.model.blocks.mixture import most_of
from hpcrl.model.shape import Lora, ModelShape, forward_flops
from hpcrl.runtime.layout import Layout
from tests.forecast.memory.shapes import DEEPSEEK, MOE, SHAPE
from tests.forecast.time.machines import gpu

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


def test_packing() -> None:
    fixed = Lengths.fixed(40, 56)
    assert packing(fixed, 12, 4 * 96).num_micro_batches == 3
    assert packing(fixed, 13, 5 * 96 - 1).num_micro_batches == 4
    assert packing(fixed, 1000, 4 * 96).num_micro_batches == 250
    varied = Lengths.log_normal(40, 56, 0.8, 300)
    for count in (16, 256, 1000):
        found = packing(varied, count, 1024).num_micro_batches
        assert count * varied.mean / 1024 * 0.97 < found < count * varied.mean / 1024 * 1.2 + 2


def test_replicas_wait_for_the_one_with_most_tokens() -> None:
    fixed, varied = Lengths.fixed(10, 90), Lengths.log_normal(10, 90, 1.0, 5000)
    assert imbalance(Passes(64, 8192, False), fixed, 8) == 1.0
    assert imbalance(Passes(512, 8192, False), varied, 8) > imbalance(Passes(512, 8192, True), varied, 8) >= 1.0
    assert imbalance(Passes(8, 8192, True), varied, 8) == pytest.approx((10 + varied.longest(8)) / varied.mean)


def test_overlap_of_gradients_hides_what_is_shorter_than_the_backward_pass() -> None:
    lengths, passes = Lengths.fixed(40, 56), Passes(64, 4 * 96, True)
    optimizer = Optimizer(12, True, True)
    slow = gpu(links__inside={"latency": 0.0, "bandwidth": 1e9})
    built = model(ranks=8, machine=slow)
    exposed, hidden = (
        update_cost(built, passes, Update(optimizer, 1, overlaps, overlaps), lengths) for overlaps in (False, True)
    )
    assert hidden.communication < exposed.communication
    numbers = built.numbers[0].all
    assert exposed.communication == pytest.approx(7 / 8 * (4 + 2) * numbers / 1e9, rel=1e-3)
    twice = update_cost(built, passes, Update(optimizer, 2, False, False), lengths)
    assert twice.seconds == pytest.approx(2 * exposed.seconds)


def test_more_tokens_take_longer() -> None:
    built = model(machine=gpu(), ranks=4, layout={"pp": 2, "tp": 2})
    took = [forward_cost(built, Passes(32, 4096, True), Lengths.fixed(40, n)).seconds for n in range(16, 600, 41)]
    assert took == sorted(took)
