"""A prefill of what follows a kept prefix has the pictures and positions of the whole."""

from __future__ import annotations

import json

import numpy as np
import torch

from hpcrl.batch.pictures import Picture
from hpcrl.model.vision import Vision
from hpcrl.rollout.engines.native.generate_call import PrefillTokens
from hpcrl.rollout.engines.native.scheduler import Sequence
from hpcrl.rollout.protocol import PromptPicture

TOWER = {"spatial_merge_size": 2, "out_hidden_size": 4}
VISION = Vision(json.dumps(TOWER), 46, 47, 48, 49, (2, 1, 1), mrope_interleaved=False)


def make_sequence(index: int, length: int, starts: tuple[int, ...]) -> Sequence:
    """With pictures of 6 tokens at `starts`."""
    ids = np.arange(length, dtype=np.int32) + 100 * index
    pictures = tuple(PromptPicture(start, Picture(start, (1, 4, 6)), torch.rand(6, 4)) for start in starts)
    return Sequence(index, ids, np.zeros(2, np.uint32), 0, 0, 4, index, pictures)


def test_tokens_after_a_start_are_a_part_of_all() -> None:
    sequences = [make_sequence(0, 40, (3, 20)), make_sequence(1, 25, ()), make_sequence(2, 30, (12,))]
    starts = np.array([14, 3, 11])
    found = PrefillTokens.of(sequences, starts, VISION)
    parts = [
        PrefillTokens.of([sequence], np.array([0]), VISION).part(start, 99)
        for sequence, start in zip(sequences, starts, strict=True)
    ]
    assert found.ids.tolist() == [token for part in parts for token in part.ids]
    positions = [each.rope_positions(VISION)[:, start:-1] for each, start in zip(sequences, starts, strict=True)]
    assert found.rope_positions is not None and (found.rope_positions == np.concatenate(positions, 1)).all()
    ends = np.cumsum([0, *(len(part.ids) for part in parts)])
    rows = [row + end for part, end in zip(parts, ends[:-1], strict=True) for row in part.rows]
    assert found.rows.tolist() == rows and len(rows) == 12
    features = [part.features for part in parts if part.features is not None]
    assert found.features is not None and torch.equal(found.features, torch.cat(features))
