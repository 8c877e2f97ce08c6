"""The vision tower: how it is built, and how its pictures are divided."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hpcrl.model.tower import build_tower, encode, successive
from hpcrl.model.vision import tower_flops
from tests.model.vision_models import VISION_MODELS, make_vision_model, vision_shape


@pytest.mark.parametrize("name", VISION_MODELS)
def test_no_random_numbers_are_drawn_and_buffers_are_those_of_transformers(name: str) -> None:
    before = torch.get_rng_state()
    tower = build_tower(vision_shape(name, {}, {}), torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), before)
    expected = dict(make_vision_model(name).model.visual.named_buffers())
    assert expected and dict(tower.named_buffers()).keys() == expected.keys()
    for buffer, found in tower.named_buffers():
        assert found.dtype == expected[buffer].dtype and torch.equal(found, expected[buffer])


def test_passes_of_a_tower() -> None:
    patches = np.array([4, 4, 90, 4, 8, 4, 4])
    assert successive([0, 1, 2, 4, 5, 6], patches, 12) == [[0, 1], [2], [4, 5], [6]]
    assert successive([0, 2, 3], patches, None) == [[0, 2, 3]]


@pytest.mark.parametrize("name", VISION_MODELS)
def test_operations_of_a_tower(name: str) -> None:
    """Those that torch sees, which on the CPU are all but attention's: pairs of patches are counted by hand."""
    shape, grids = vision_shape(name, {}, {}), [(1, 6, 8), (2, 4, 4)]
    tower = build_tower(shape, torch.float32)
    patches = torch.zeros(48 + 32, shape.vision.patch_width)
    with FlopCounterMode(display=False) as counter:
        encode(tower, patches, torch.tensor(grids))
    frames, windows = 48**2 + 2 * 16**2, 2 * 16**2 + 2 * 8**2 + 2 * 16**2
    pairs = frames + windows if name == "qwen2.5-vl" else 3 * frames
    assert tower_flops(shape.vision, grids) == counter.get_total_flops() + 4 * 16 * pairs
