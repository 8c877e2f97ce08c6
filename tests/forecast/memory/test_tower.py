"""What pictures hold, against the live tensor bytes of small models on the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hpcrl.config.schema import EngineConfig, RecomputeConfig
from hpcrl.engine.engine import TrainEngine
from hpcrl.forecast.memory.generation import PicturePass, encoding_work
from hpcrl.forecast.memory.state import RoleModel
from hpcrl.model.shape import ModelShape
from hpcrl.model.tower import build_tower, encode
from hpcrl.model.vision import Trained
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.runtime.groups import fake_rank
from tests.covering import covering
from tests.forecast.memory.passes import (
    DTYPES,
    GRID,
    PICTURE_TOKENS,
    SAMPLES,
    TOKENS,
    loss,
    make_batch,
    make_pass,
    with_pictures,
)
from tests.forecast.memory.test_memory import ADAM, LAYOUTS, make_engine
from tests.live_bytes import LiveBytes
from tests.model.vision_models import VISION_MODELS, vision_shape

PATCHES = GRID[1] * GRID[2]
DENSE = ("qwen2.5-vl", "qwen3-vl")  # experts are in tests/forecast/memory/test_memory.py
TRAINED = ("none", "merger", "tower", "all")
TEXT = {"hidden_size": 96, "intermediate_size": 208, "head_dim": 12}
TOWER = {"hidden_size": 32, "intermediate_size": 80, "out_hidden_size": 96}
BUFFERS = 2 * 4 * 4  # of the rotary embedding: 4 frequencies in fp32, and a copy


def small(name: str, train: Trained) -> ModelShape:
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 2, 2], "partial_rotary_factor": 1.0}
    interleaved = {} if name == "qwen2.5-vl" else {"mrope_interleaved": True}
    shape = vision_shape(name, TEXT | {"rope_parameters": rope | interleaved}, TOWER)
    return replace(shape, vision=replace(shape.vision, train=train))


@covering(
    ["tp2pp2", "cp2dp2"],
    name=DENSE,
    train=TRAINED,
    itemsize=(2, 4),
    layout=("alone", "tp2pp2", "cp2dp2"),
)
def test_training_and_forward_are_the_live_bytes(
    monkeypatch: pytest.MonkeyPatch, name: str, train: Trained, itemsize: int, layout: str
) -> None:
    """Also weights, gradients and optimizer, of which frozen parts of the tower have none."""
    monkeypatch.setattr("hpcrl.engine.microbatch.tokens_of_towers", lambda column, _: np.zeros(len(column), np.int64))
    shape = small(name, train)
    model = RoleModel(shape, LAYOUTS[layout], "lm", itemsize, ADAM)
    recomputed = [RecomputeConfig(granularity="full")] if train == "none" or not shape.vision.num_deepstack else []
    for again in (None, *recomputed):
        rank = model.layout.rank_of()
        with fake_rank(model.layout, rank) as groups, LiveBytes() as live:
            engine: TrainEngine = make_engine(model, groups, 64, again)
            resident = live.live()
            assert resident - BUFFERS == model.state(0, rank).total
            batch = with_pictures(make_batch(), shape.vision)
            live.restart_peak()
            engine.train(batch, max_tokens=TOKENS, loss=loss, entropy=True)
            planned = shown(replace(make_pass(model, entropy=True), chunk_tokens=64, recompute=again))
            assert sum(planned.training(0)) == pytest.approx(live.peak - resident, rel=0.1)
            live.restart_peak()
            engine.log_probs(batch, max_tokens=TOKENS, temperature=1.0, entropy=True)
            assert sum(planned.forward(0)) == pytest.approx(live.peak - resident, rel=0.1)
            del engine


def shown(planned):
    """The pass with the pictures of `with_pictures`."""
    model, vision = planned.model, planned.model.shape.vision
    each, num_ranks = SAMPLES // planned.count, model.layout.tp * model.layout.cp
    patches = 0 if vision.train == "none" else each * PATCHES // num_ranks
    tokens = each * PICTURE_TOKENS
    pictures = PicturePass(vision, model.itemsize, tokens, patches, num_ranks, num_parts=model.layout.tp)
    return replace(planned, pictures=pictures)


@covering(name=tuple(VISION_MODELS), train=TRAINED[1:], itemsize=(2, 4))
def test_what_a_tower_keeps(name: str, train: Trained, itemsize: int) -> None:
    shape = small(name, train)
    tower, patches = build_tower(shape, DTYPES[itemsize]), torch.zeros(2 * PATCHES, shape.vision.patch_width)
    for parameter_name, parameter in tower.named_parameters():
        parameter.requires_grad_(shape.vision.is_trained(parameter_name))
    with LiveBytes(apart=[*tower.parameters(), *tower.buffers()]) as live:
        features = encode(tower, patches + 0.0, torch.tensor([GRID, GRID]))
        planned = PicturePass(shape.vision, itemsize, 2 * PICTURE_TOKENS, 2 * PATCHES)
        assert live.live() - features.nbytes == pytest.approx(planned.kept, rel=0.03)


@covering(name=tuple(VISION_MODELS), train=("none", "all"), itemsize=(2, 4))
def test_encoding_is_the_live_bytes(name: str, train: Trained, itemsize: int) -> None:
    """Pictures of several shares."""
    shape, cfg = small(name, train), EngineConfig(max_num_batched_tokens=5 * PICTURE_TOKENS, max_num_seqs=1)
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": cfg.max_num_batched_tokens, "max_model_len": 64}
    engine = NativeEngine(shape, None, 0, 1, DTYPES[itemsize], **limits)
    grids, patches = np.array([GRID] * SAMPLES), np.ones((PATCHES, shape.vision.patch_width), np.float32)
    planned = encoding_work(cfg, shape.vision, 1, itemsize, SAMPLES, PICTURE_TOKENS)
    tower = engine._decoder.tower
    assert tower is not None
    with LiveBytes(apart=[*tower.parameters(), *tower.buffers()]) as live:
        engine.encode(grids, lambda numbers: [patches for _ in numbers])
        unseen = 5 * patches.nbytes if train == "all" and itemsize < 4 else 0  # no operation makes a view of them
        assert planned == pytest.approx(live.peak + unseen, rel=0.1)
