from __future__ import annotations

import itertools
import os
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.runtime.layout import Layout

SIZES = st.integers(1, 3)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp, cp, dp, pp = (draw(SIZES) for _ in range(4))
    first = draw(st.integers(0, 5))
    return Layout(tuple(range(first, first + tp * cp * dp * pp)), tp=tp, cp=cp, pp=pp)


@given(layouts())
def test_coordinates_and_ranks_are_inverse(layout: Layout) -> None:
    for rank in layout.ranks:
        coord = layout.coord(rank)
        assert layout.rank_of(**coord._asdict()) == rank


@given(layouts(), st.sets(st.sampled_from(["tp", "cp", "dp", "pp"]), min_size=1))
def test_groups_partition_the_ranks_and_differ_only_along_their_dimensions(layout: Layout, dims: set[str]) -> None:
    groups = layout.groups(*dims)
    assert sorted(itertools.chain(*groups)) == sorted(layout.ranks)
    for group in groups:
        coords = [layout.coord(rank)._asdict() for rank in group]
        assert all(len({c[axis] for c in coords}) == 1 for axis in coords[0] if axis not in dims)
        assert list(group) == sorted(group)


@given(layouts(), st.sampled_from([("tp",), ("dp",), ("pp",), ("tp", "pp"), ("cp", "dp"), ("tp", "cp", "dp")]))
def test_groups_equal_megatrons_hyper_comm_grid(layout: Layout, dims: tuple[str, ...]) -> None:
    from megatron.core.hyper_comm_grid import HyperCommGrid

    first = layout.ranks[0]
    sizes = [layout.tp, layout.cp, layout.dp, layout.pp]
    with mock.patch.dict(os.environ, WORLD_SIZE=str(first + layout.size)):  # else it asks torch.distributed
        grid = HyperCommGrid(sizes, ["tp", "cp", "dp", "pp"], rank_offset=first)
    expected = grid.get_rank_enum(list(dims))
    assert sorted(tuple(group) for group in expected) == sorted(layout.groups(*dims))


@given(layouts())
def test_home_is_the_last_stage_of_its_replica(layout: Layout) -> None:
    for dp, leader in enumerate(layout.leaders):
        assert leader in layout.replica(dp)
        assert layout.coord(leader) == (0, 0, dp, layout.pp - 1)


def test_expert_grid_lies_over_the_same_ranks() -> None:
    layout = Layout(tuple(range(16)), tp=2, pp=2, ep=4, etp=1)
    assert layout.edp == 2
    assert layout.groups("ep")[0] == (0, 1, 2, 3)
    assert layout.groups("edp")[0] == (0, 4)


def test_sizes_that_do_not_divide_the_pool_are_refused() -> None:
    with pytest.raises(ValueError, match="does not divide the pool's 4 ranks"):
        Layout((0, 1, 2, 3), tp=3)
