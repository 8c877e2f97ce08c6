"""The roofline of operators, and collectives, against values worked out by hand."""

from __future__ import annotations

import pytest

from hpcrl.forecast.time.cost import Cost, Group, Network, Units, fitted, group_of, interpolated
from hpcrl.forecast.time.phases import Timed
from hpcrl.runtime.layout import Layout
from tests.forecast.time.machines import cpu, gpu

UNITS = Units.of(gpu().device, "bfloat16", 2)
INSIDE, ACROSS = Group(8, 8, 8), Group(16, 8, 8)


def test_a_large_product_is_limited_by_operations() -> None:
    found = UNITS.product(4000, 8192, 8192)
    assert found.products == pytest.approx(2 * 8192**2 * (4000 + 100) / 8e14)
    assert (found.memory, found.launches) == (0.0, 5e-6)


def test_at_half_rows_half_of_the_rate_is_reached() -> None:
    whole, half = (2 * rows * 512**2 / UNITS.product(rows, 512, 512).products for rows in (1e12, 100))
    assert half == pytest.approx(whole / 2)


def test_a_product_of_few_rows_is_limited_by_the_bytes_of_its_weights() -> None:
    slow = Units.of(gpu(device__memory_bandwidth=1e12).device, "bfloat16", 2)
    found = slow.product(1, 8192, 8192)
    nbytes = 2 * (8192**2 + 2 * 8192)
    assert found.products + found.memory == pytest.approx(nbytes / 1e12)
    assert found.memory > 0


def test_groups_have_a_matrix_each() -> None:
    """Experts: few rows each are slower than the same rows of one matrix."""
    one, four = UNITS.product(400, 512, 512), UNITS.product(400, 512, 512, groups=4)
    each = UNITS.product(100, 512, 512)
    assert four.products == pytest.approx(4 * each.products)
    assert four.products > one.products


def test_attention_by_pairs_and_graphs() -> None:
    assert UNITS.attention(1e6, 500, 128).attention == pytest.approx(2 * 1e6 * 128 * 2 / 5e14)
    assert Units.of(gpu().device, "bfloat16", 2, replays=True).launch == 1e-6
    assert Units.of(cpu().device, "bfloat16", 2, replays=True).launch == 5e-6
    assert Units.of(cpu().device, "bfloat16", 2).flops == 1e11  # a CPU without a rate of bf16


def test_shares() -> None:
    cost = Cost(products=3.0, waiting=1.0) * 2.0
    assert cost.seconds == 8.0
    assert cost.shares() == {"products": 0.75, "waiting": 0.25}


def test_a_ring_inside_a_node() -> None:
    network, nbytes = Network.of(gpu()), 1e9
    assert network.all_gather(nbytes, INSIDE) == pytest.approx(7 * 3e-6 + 7 / 8 * nbytes / 4e11)
    assert network.all_reduce(nbytes, INSIDE) == pytest.approx(2 * network.all_gather(nbytes, INSIDE))
    assert network.all_reduce(8, INSIDE) == pytest.approx(3 * 3e-6, rel=1e-3)  # recursive doubling
    assert network.all_reduce(nbytes, Group(1, 1, 8)) == 0.0


def test_rings_between_nodes_share_the_links_of_a_node() -> None:
    network = Network.of(gpu())
    assert network.link(ACROSS) == 4e11  # eight network cards, as fast as a link inside
    assert network.link(Group(16, 1, 8)) == 5e10
    assert Network.of(gpu(node__network=1e11)).link(Group(16, 1, 8)) == 1e11 / 8
    assert Network.of(cpu()).link(Group(4, 2, 4)) == 1e9  # one ring


def test_a_ring_over_nodes_has_most_of_its_hops_inside_them() -> None:
    network, nbytes = Network.of(gpu()), 1e9
    assert network.all_gather(nbytes, ACROSS) == pytest.approx(14 * 3e-6 + 1e-5 + 15 / 16 * nbytes / 4e11)
    assert network.all_reduce(8, ACROSS) == pytest.approx(3 * 3e-6 + 1e-5, rel=1e-3)
    assert network.all_gather(0, Group(4, 1, 8)) == pytest.approx(3 * 1e-5)
    assert network.all_gather(0, Group(12, 4, 4)) == pytest.approx(9 * 3e-6 + 2 * 1e-5)


def test_an_exchange_takes_the_slower_of_its_links() -> None:
    network, nbytes = Network.of(gpu()), 16e9
    far = 8 * nbytes / 16 / 5e10
    assert network.all_to_all(nbytes, ACROSS) == pytest.approx(7 * 3e-6 + 8 * 1e-5 + far)


def test_groups_of_a_layout() -> None:
    layout = Layout(tuple(range(32)), tp=4, pp=2)
    assert group_of(layout, 8, "tp") == Group(4, 4, 8)
    assert group_of(layout, 8, "dp") == Group(4, 2, 8)
    assert group_of(layout, 8, "pp") == Group(2, 1, 8)
    assert group_of(Layout(tuple(range(16)), tp=16), 8, "tp") == ACROSS


def test_measured_groups_are_interpolated() -> None:
    points = ((2, 0.9), (8, 0.6))
    assert [interpolated(points, size) for size in (1, 2, 5, 8, 64)] == pytest.approx([0.9, 0.9, 0.75, 0.6, 0.6])
    slower = Network.of(gpu(links__group={2: 0.5}))
    assert slower.link(INSIDE) == 2e11


def test_ranks_without_cores_wait_in_collectives() -> None:
    machine, pair = cpu(node__contention=1e-3), Group(2, 2, 4)
    crowded, alike = Network.of(machine, 4), Network.of(machine, 2)
    assert alike.all_reduce(4.0, pair) == Network.of(cpu()).all_reduce(4.0, pair)
    for name in ("all_gather", "all_reduce", "all_to_all", "send"):
        waited = getattr(crowded, name)(4.0, pair) - getattr(alike, name)(4.0, pair)
        assert waited * 4 / 2 == pytest.approx(1e-3)  # tasks of 4 ranks take twice as long on 2 cores


def test_a_rank_that_waits_needs_no_core() -> None:
    cost = Cost(products=3.0, bubble=1.0)
    assert Timed("update_actor", "actor", "train", (0, 1), cost, 0.5).demand == 0.75 * 0.5
    half = cpu(efficiency={"gen": 0.5})
    assert fitted(cost, half, "gen") == Cost(products=6.0, bubble=2.0) and fitted(cost, half, "adv") == cost
    assert fitted(Cost(communication=2.0, memory=1.0), half, "gen") == Cost(communication=2.0, memory=2.0)
