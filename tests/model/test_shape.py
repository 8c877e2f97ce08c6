"""ModelShape from the configuration, and initial weights as a function of (seed, name)."""

from __future__ import annotations

import pytest
import torch

from hpcrl.config.schema import ModelConfig
from hpcrl.launch.exits import InputError
from hpcrl.model.build import initial_weight
from hpcrl.model.shape import ModelShape


def test_shape_takes_tokenizer_vocabulary_and_derives_head_dim():
    shape = ModelShape.from_config(ModelConfig(hidden_size=128, num_attention_heads=4), vocab_size=100)
    assert (shape.vocab_size, shape.padded_vocab_size, shape.head_dim) == (100, 128, 32)
    assert ModelShape.from_config(ModelConfig(vocab_size=128), vocab_size=100).padded_vocab_size == 128


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ModelConfig(hidden_size=100, num_attention_heads=8), "does not divide model.hidden_size"),
        (ModelConfig(num_attention_heads=4, num_query_groups=3), "does not divide model.num_attention_heads"),
        (ModelConfig(vocab_size=50), "below the tokenizer's"),
        (ModelConfig(head_dim=31), "odd"),
    ],
)
def test_impossible_shapes_are_refused(config, words):
    with pytest.raises(InputError, match=words):
        ModelShape.from_config(config, vocab_size=100)


def test_initial_weights_depend_on_seed_and_name_alone():
    shape = ModelShape.from_config(ModelConfig(init_std=0.1, num_layers=2), vocab_size=100)
    draw = lambda name, seed: initial_weight(shape, name, (256, 128), seed)  # noqa: E731
    fc1, proj = "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.self_attention.linear_proj.weight"
    assert torch.equal(draw(fc1, 1), draw(fc1, 1))
    assert not torch.equal(draw(fc1, 1), draw(fc1, 2))
    assert not torch.equal(draw(fc1, 1), draw(fc1.replace("0", "1"), 1))
    assert draw(fc1, 1).std() == pytest.approx(0.1, rel=0.02)
    assert draw(proj, 1).std() == pytest.approx(0.1 / 2, rel=0.02)
    assert torch.equal(initial_weight(shape, "decoder.final_layernorm.weight", (128,), 0), torch.ones(128))
    assert not initial_weight(shape, "value_head.weight", (1, 128), 0).any()
