"""The vision tower: how it is built, and how its pictures are divided."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcrl.model.tower import build_tower, successive
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
