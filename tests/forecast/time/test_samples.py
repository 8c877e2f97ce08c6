"""Phases over samples: packing, updates, and generation against a loop over its decode steps."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest

from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.passes import Micro
from hpcrl.forecast.time.samples import (
    GROUPS,
    Engine,
    Optimizer,
    Passes,
    Update,
    Work,
    forward_cost,
    generation_cost,
    grouped,
    imbalance,
    micro_batch,
    occupied,
    packing,
    schedule,
    update_cost,
)
from tests.forecast.memory.shapes import SHAPE
from tests.forecast.time.machines import cpu, gpu
from tests.forecast.time.test_passes import model

BF16 = 2  # bytes


def test_packing() -> None:
    fixed = Lengths.fixed(40, 56)
    assert packing(fixed, 12, 4 * 96) == 3
    assert packing(fixed, 13, 5 * 96 - 1) == 4
    assert packing(fixed, 1000, 4 * 96) == 250
    varied = Lengths.log_normal(40, 56, 0.8, 300)
    for count in (16, 256, 1000):
        found = packing(varied, count, 1024)
        assert count * varied.mean / 1024 * 0.97 < found < count * varied.mean / 1024 * 1.2 + 2


def test_micro_batches_have_the_rows_of_the_engine() -> None:
    for rows in (8, 32):
        built = replace(model(), row_multiple=rows)
        assert micro_batch(built, Passes(1, 512, True), Lengths.fixed(41, 56))[0].tokens == {8: 104, 32: 128}[rows]


def test_replicas_wait_for_the_one_with_most_tokens() -> None:
    fixed, varied = Lengths.fixed(10, 90), Lengths.log_normal(10, 90, 1.0, 5000)
    assert imbalance(Passes(64, 8192, False), fixed, 8) == 1.0
    assert imbalance(Passes(512, 8192, False), varied, 8) > imbalance(Passes(512, 8192, True), varied, 8) >= 1.0
    assert imbalance(Passes(8, 8192, True), varied, 8) == pytest.approx((10 + varied.longest(8)) / varied.mean)


def test_overlap_of_gradients_hides_what_is_shorter_than_the_backward_pass() -> None:
    lengths, passes = Lengths.fixed(40, 56), Passes(64, 4 * 96, True)
    optimizer = Optimizer(12, 12, True, True)
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


def running_by_step(responses: list[int], slots: int) -> list[int]:
    """How many sequences run in each step, token by token."""
    waiting, left, found = deque(responses), list[int](), []
    while waiting or left:
        while waiting and len(left) < slots:
            left.append(waiting.popleft())
        found.append(len(left))
        left = [tokens - 1 for tokens in left if tokens > 1]
    return found


@pytest.mark.parametrize("slots", [1, 3, 8, 100])
def test_slots_are_taken_as_step_by_step(slots: int) -> None:
    responses = random.Random(slots).choices(range(1, 30), k=40)
    expected = running_by_step(responses, slots)
    found = [int(running) for num, running in occupied(responses, slots) for _ in range(int(num))]
    assert found == expected
    assert sum(expected) == sum(responses)


@pytest.mark.parametrize("machine", [gpu(), cpu()], ids=["gpu", "cpu"])
@pytest.mark.parametrize("slots", [5, 64])
def test_decode_is_the_sum_over_its_steps(machine: object, slots: int) -> None:
    engine = Engine(model(machine=machine, sequence_parallel=False), 4096, BF16)
    responses = random.Random(slots).choices(range(1, 200), k=64)
    expected = sum(engine.step(running).seconds for running in running_by_step(responses, slots))
    assert engine.decode(grouped(occupied(responses, slots))).seconds == pytest.approx(expected, rel=0.01)
    few = [20] * 3 + [30] * 2  # so many that no steps are grouped
    exact = sum(engine.step(running).seconds for running in running_by_step(few, slots))
    assert engine.decode(grouped(occupied(few, slots))).seconds == pytest.approx(exact, rel=1e-9)


def test_groups_keep_all_tokens() -> None:
    responses = random.Random(1).choices(range(1, 500), k=300)
    steps = occupied(responses, 128)
    found = grouped(steps)
    assert len(found) <= GROUPS
    assert sum(it.num_steps * it.running for it in found) == pytest.approx(sum(responses))
    assert sum(it.num_steps for it in found) == sum(it.num_steps for it in steps)


def test_decode_ends_with_the_longest_of_all_engines() -> None:
    lengths = Lengths.log_normal(10, 100, 0.8, 4000)
    for total in (64, 1024):
        steps = schedule(lengths, 64, 256, total)
        assert sum(it.num_steps for it in steps) == pytest.approx(lengths.longest(total), rel=0.05)
    fixed = schedule(Lengths.fixed(10, 100), 5000, 50, 5000)
    assert sum(it.num_steps for it in fixed) == pytest.approx(100 * 100, rel=0.03)
    assert sum(it.num_steps * it.running for it in fixed) == pytest.approx(5000 * 100, rel=0.03)


def test_the_kv_cache_is_read_token_by_token() -> None:
    machine = gpu(device__attention={"bfloat16": {"flops": 1e30}})
    engine = Engine(model(machine=machine), 4096, BF16)
    prompt, response = 40, 56
    tokens = sum(prompt + drawn for drawn in range(1, response + 1))
    nbytes = 2 * 2 * SHAPE.num_query_groups * SHAPE.head_dim * SHAPE.num_layers
    assert engine.cached(3, Lengths.fixed(prompt, response)).seconds == pytest.approx(3 * tokens * nbytes / 3e12)


def test_a_prompt_of_a_group_is_prefilled_once() -> None:
    engine, lengths = Engine(model(machine=gpu()), 256, BF16), Lengths.fixed(64, 1)
    each, shared = (engine.prefill(prompts, lengths).seconds for prompts in (64, 16))
    assert each == pytest.approx(4 * shared)
    assert generation_cost(engine, Work(0, 0, 8, 8), lengths).seconds == 0.0


def test_an_engine_that_never_stops_has_no_tail() -> None:
    engine, lengths = Engine(model(machine=gpu()), 4096, BF16), Lengths.log_normal(10, 100, 1.0, 4000)
    work = Work(64, 64, 64, 64)
    assert engine.steadily(work, lengths, 64).seconds < 0.5 * generation_cost(engine, work, lengths).seconds


def test_weights_and_a_cache_in_8_bits_are_half_as_many_bytes() -> None:
    """On a device that computes as fast as it likes; one without 8-bit products writes and reads 16 bits in between."""
    fast = {"flops": 1e30}
    machine = gpu(device__matmul={"bfloat16": fast, "float8": fast}, device__attention={"bfloat16": fast})
    plain = model(machine=machine)
    for device, share in ((machine.device, 0.5), (gpu(device__matmul={"bfloat16": fast}).device, 2.5)):
        layers = plain.units.with_8_bit_weights(device)
        found = replace(plain, large_units=layers, large_elements=0)
        (before,), (after,) = (it.forward(Micro(1.0, 0.0, 1.0, 0.0)) for it in (plain, found))
        matrices = SHAPE.num_layers * 96 * (256 + 128 + 3 * 208)  # qkv, proj, and the MLP's
        assert after.memory - before.memory == pytest.approx((share - 1) * BF16 * matrices / 3e12, rel=1e-6)
    lengths = Lengths.fixed(40, 56)
    half, whole = (Engine(plain, 4096, itemsize).cached(3, lengths).seconds for itemsize in (1, BF16))
    assert half == pytest.approx(whole / 2)
