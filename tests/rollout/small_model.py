"""A model that generates in milliseconds, and prompts for it."""

from __future__ import annotations

import numpy as np
import torch

from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.protocol import Request

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=8,
    vocab_size=50,
)


def draw_weights(engine: NativeEngine, seed: int = 0) -> None:
    """Large enough for a policy that is far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in engine.weights().items():
        noise = torch.randn(weight.shape, generator=generator)
        weight.copy_(1 + 0.1 * noise if "layernorm" in name else 0.2 * noise)


def make_requests(num_prompts: int, samples: int, *, longest: int, seed: int = 0) -> list[Request]:
    """Prompts of less than `longest` tokens, each `samples` times in a row."""
    generator = np.random.default_rng(seed)
    return [
        Request(prompt, f"file:{number}:0", sample_index)
        for number in range(num_prompts)
        for prompt in [generator.integers(0, SHAPE.vocab_size, generator.integers(1, longest))]
        for sample_index in range(samples)
    ]
