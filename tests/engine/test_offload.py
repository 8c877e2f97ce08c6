"""Storages that leave and come back, over host memory of small blocks."""

from __future__ import annotations

import pytest
import torch

from hpcrl.engine import offload
from hpcrl.engine.offload import HostMemory, Offload, Offloadable, offload_of, storages_of


@pytest.fixture
def host(monkeypatch) -> HostMemory:
    monkeypatch.setattr(offload, "HOST_BLOCK", 64)
    return HostMemory(pinned=False)


def test_views_keep_their_values_over_blocks_of_the_host(host: HostMemory) -> None:
    sizes = [5, 0, 16, 33, 3]  # in fp32, of which a block holds 16
    wholes = [torch.randn(size) for size in sizes]
    views = [whole[::2] for whole in wholes]
    expected = [view.clone() for view in views]
    away = Offloadable(lambda: storages_of([*views, *wholes]), host)
    addresses: list[list[int]] = []
    for _ in range(2):
        away.unload()
        assert [whole.untyped_storage().nbytes() for whole in wholes] == [0] * 5
        addresses.append([block.data_ptr() for block in host.blocks])
        away.load()
        assert all(torch.equal(view, values) for view, values in zip(views, expected, strict=True))
    assert addresses[0] == addresses[1]
    assert host.nbytes == 256  # of 4 * sum(sizes) = 228

    wholes.append(torch.ones(20))
    views.append(wholes[-1])
    away.unload()
    assert [block.data_ptr() for block in host.blocks][:4] == addresses[0]
    away.load()
    assert torch.equal(wholes[-1], torch.ones(20))


def test_what_came_for_an_inner_use_stays_for_the_outer_one(host: HostMemory) -> None:
    weights, moments = torch.ones(8), torch.ones(8)
    parts = {
        "parameters": Offloadable(lambda: storages_of([weights]), host),
        "optimizer": Offloadable(lambda: storages_of([moments]), HostMemory(pinned=False)),
    }
    role = Offload(parts, torch.device("cpu"))
    role.unload()
    there = lambda: (weights.untyped_storage().nbytes(), moments.untyped_storage().nbytes())  # noqa: E731
    assert there() == (0, 0)
    with role.on_device("parameters"):
        assert there() == (32, 0)
        with role.on_device("parameters", "gradients", "optimizer"):
            assert there() == (32, 32)
            moments *= 2
        assert there() == (32, 0)
    assert there() == (0, 0)
    with role.on_device("optimizer"):
        assert torch.equal(moments, torch.full((8,), 2.0))


def test_8_bit_copies_are_freed_with_the_weights() -> None:
    """Transformer Engine's layers keep them from one pass to the next, and make those that are missing."""
    layer = torch.nn.Linear(8, 8)
    layer._fp8_workspaces = {"weight": torch.ones(8, 8, dtype=torch.uint8)}  # type: ignore[assignment]
    role = offload_of([torch.nn.Sequential(layer)], [], None, ("parameters",))
    weights = layer.weight.detach().clone()
    role.unload()
    assert not layer._fp8_workspaces and layer.weight.untyped_storage().nbytes() == 0
    with role.on_device("parameters"):
        assert torch.equal(layer.weight, weights)
