from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hpcrl.kernels.pack import RepeatedCopies
from tests.kernels.close import DTYPES, poisoned

ROWS, COLS = 200, 384
# rows, columns, and where they lie in source and destination: aligned, at odd places, a column, a row, whole rows of
# one and of both, more than a tile has, none
RECTANGLES = (
    (16, 64, (0, 0), (8, 128)),
    (5, 37, (20, 3), (30, 201)),
    (30, 1, (20, 100), (30, 7)),
    (1, 384, (50, 0), (60, 0)),
    (9, 256, (60, 128), (70, 0)),
    (100, 384, (100, 0), (100, 0)),
    (0, 10, (0, 0), (0, 0)),
    (10, 0, (0, 0), (0, 0)),
)


def views(source: Tensor, destination: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for rows, cols, *corners in RECTANGLES:
        one, two = (
            x[row : row + rows, col : col + cols] for x, (row, col) in zip((source, destination), corners, strict=True)
        )
        yield one, two


def same(one: Tensor, two: Tensor) -> bool:
    """Bit for bit."""
    return torch.equal(one.view(torch.uint8), two.view(torch.uint8))


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("of", DTYPES)
def test_rectangles_arrive_and_nothing_else_is_touched(device: torch.device, of: torch.dtype, to: torch.dtype) -> None:
    """Halves of fp32 numbers and subnormal ones are rounded as torch does it; within a dtype every bit pattern goes."""
    copies = RepeatedCopies()
    bits = torch.randint(-(2**15), 2**15, (ROWS, COLS * 2), dtype=torch.int16, device=device)
    source = bits.view(torch.float32).to(of) if of == torch.float32 else bits[:, :COLS].contiguous().view(of)
    if of != to:
        source = torch.where(source.isnan(), 0.5, source)
    destination = poisoned((ROWS, COLS), to, device)
    expected = destination.clone()
    for one, two in views(source, expected):
        two.copy_(one)
    copies.run([source, destination], lambda: views(source, destination))
    assert same(destination, expected)


def test_tensors_that_move_take_the_table_with_them(device: torch.device) -> None:
    """Same parameter, other memory: as after an offload, or when an engine adopts the actor's weights."""
    copies, asked = RepeatedCopies(), []
    source, destination = torch.zeros(40, 64, device=device), poisoned((40, 64), torch.bfloat16, device)

    def run(first: int) -> None:
        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            asked.append(first)
            yield source[first:], destination[: len(source) - first]

        source.copy_(torch.rand_like(source))
        copies.run([source, destination], pairs)
        assert torch.equal(destination[: len(source) - first], source[first:].bfloat16())

    run(8)
    run(8)
    assert asked == [8], "the second run has the table of the first"
    source, before = torch.zeros(40, 64, device=device), source
    run(8)
    destination, after = poisoned((40, 64), torch.bfloat16, device), destination
    run(8)
    assert asked == [8, 8, 8] and before is not source and after is not destination
    source = torch.zeros(40, 64, device=device, dtype=torch.float16)
    run(8)


def test_a_plan_of_aligned_weights_is_one_launch(device: torch.device) -> None:
    """Queries, keys and values that lie by groups, into one row after the other."""
    from hpcrl.kernels.pack_triton import launches

    groups, heads, head, hidden = 4, 2, 8, 32
    mixed = torch.randn(groups * (heads + 2) * head, hidden, device=device)
    parts = [torch.empty(groups * size * head, hidden, device=device) for size in (heads, 1, 1)]

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for group, block in enumerate(mixed.split((heads + 2) * head)):
            for part, its in zip(parts, block.split([heads * head, head, head]), strict=True):
                yield its, part[group * len(its) : (group + 1) * len(its)]

    (launch,) = launches(pairs(), device)
    assert launch.vector == 4
    RepeatedCopies().run([mixed, *parts], pairs)
    by_group = mixed.view(groups, heads + 2, head, hidden)
    for part, expected in zip(parts, by_group.split([heads, 1, 1], 1), strict=True):
        assert torch.equal(part, expected.reshape(-1, hidden))


def test_what_has_no_plain_memory_goes_to_torch(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hpcrl.kernels.dispatch")
    source, destination = torch.randn(6, 8, device=device, dtype=torch.float64), torch.zeros(6, 8, device=device)
    RepeatedCopies().run([source, destination], lambda: [(source, destination)])
    assert torch.equal(destination, source.float())
    turned = torch.randn(8, 6, device=device).T
    RepeatedCopies().run([turned, destination], lambda: [(turned, destination)])
    assert torch.equal(destination, turned)
    assert "torch, tensors of torch.float64" in caplog.text and "rows are strided" in caplog.text
    RepeatedCopies().run([], list)
