"""Packed attention, rotary embedding and RMSNorm against their formulas, one sequence at a time."""

from __future__ import annotations

import math

import torch

from hpcrl.batch.ragged import moved
from hpcrl.kernels.layers import apply_rope, rms_norm
from hpcrl.model.blocks.attention import Rope
from hpcrl.model.blocks.attention_modules import PackedAttention
from hpcrl.model.blocks.rope_angles import rope_cos_sin
from hpcrl.model.gpt import pack
from hpcrl.model.shape import ModelShape

SHAPE = ModelShape(
    num_layers=1,
    hidden_size=32,
    ffn_hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=8,
    vocab_size=10,
)


def rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """(T, heads, d): elements i and i + d/2 as a complex number, turned by position * theta^(-2i/d)."""
    length, _, width = x.shape
    number = torch.complex(x[..., : width // 2].double(), x[..., width // 2 :].double())
    frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    turn = torch.polar(torch.ones(()).double(), torch.arange(length).double()[:, None, None] * frequency)
    number = number * turn
    return torch.cat((number.real, number.imag), dim=-1).float()


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One sequence: (T, heads, d) and (T, groups, d) -> (T, heads * d), by softmax over the tokens up to each one."""
    length, heads, width = query.shape
    query, key = rotated(query, SHAPE.rope_theta), rotated(key, SHAPE.rope_theta)
    key = key.repeat_interleave(heads // key.size(1), dim=1)
    value = value.repeat_interleave(heads // value.size(1), dim=1)
    scores = torch.einsum("ihd,jhd->hij", query, key) / math.sqrt(width)
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), value).flatten(1)


def test_packed_attention_is_attention_of_each_sequence():
    torch.manual_seed(0)
    lengths = torch.tensor([5, 1, 9, 3])
    total, size = 18, 24
    packed = pack(torch.arange(total), lengths, SHAPE, size=size)
    tensors = [torch.randn(size, heads, SHAPE.head_dim, requires_grad=True) for heads in (4, 2, 2)]
    weight = torch.randn(size, 32)

    found = PackedAttention(rope=SHAPE.rope)(*tensors, None, packed_seq_params=packed)
    found_grads = torch.autograd.grad((found * weight).sum(), tensors)
    pieces = [attention(*one) for one in zip(*(x[:total].split(lengths.tolist()) for x in tensors), strict=True)]
    expected = torch.cat(pieces)
    expected_grads = torch.autograd.grad((expected * weight[:total]).sum(), tensors)

    torch.testing.assert_close(found[:total], expected, rtol=0, atol=1e-5)
    assert not found[total:].any()
    for a, b in zip(found_grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_pack_places_every_token():
    ids = torch.tensor([7, 8, 9, 5, 6], dtype=torch.int32)
    packed = pack(ids, torch.tensor([3, 2]), SHAPE, size=8)
    assert packed.input_ids.tolist() == [[7, 8, 9, 5, 6, 0, 0, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert packed.slots.tolist() == [0, 1, 2, 3, 4]
    assert packed.buckets == ((2, 3),)
    assert packed.sources[packed.slots].tolist() == [0, 1, 2, 3, 4]


def test_the_rotary_embedding_of_packed_tokens_is_computed_on_the_device():
    ids, lengths = torch.tensor([7, 8, 9, 5, 6], dtype=torch.int32), torch.tensor([3, 2])
    packed = pack(ids, lengths, SHAPE, size=8)
    for device in (torch.device("cpu"), torch.device("meta")):
        cos, sin = moved(packed, device).angles(SHAPE.rope)
        assert cos.device == sin.device == device
        assert cos.shape == sin.shape == (8, SHAPE.rope.dim // 2)
    assert torch.equal(
        packed.angles(SHAPE.rope)[1][[1, 4]],
        rope_cos_sin(torch.tensor([1, 1]), SHAPE.rope)[1],
    )


def test_rope_turns_pairs_and_its_gradient_turns_back():
    torch.manual_seed(0)
    x = torch.randn(6, 3, 8, requires_grad=True)
    cos, sin = rope_cos_sin(torch.arange(6), Rope(8, 500.0))
    torch.testing.assert_close(apply_rope(x, cos, sin), rotated(x, 500.0), rtol=0, atol=1e-5)
    assert torch.autograd.gradcheck(
        lambda y: apply_rope(y, cos.double(), sin.double()), torch.randn(6, 3, 8).double().requires_grad_()
    )


def test_rms_norm_is_its_formula():
    torch.manual_seed(0)
    x, weight = torch.randn(5, 16), torch.randn(16)
    expected = weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)
    assert rms_norm(x.bfloat16(), weight.bfloat16(), 1e-5).dtype is torch.bfloat16


def test_long_and_short_sequences_are_not_padded_to_one_width():
    lengths = torch.tensor([3, 4096, 2, 70, *[64] * 32])
    packed = pack(torch.zeros(int(lengths.sum()), dtype=torch.int32), lengths, SHAPE, size=6224)
    assert packed.buckets == ((1, 4096), (33, 70), (2, 3))
    assert torch.equal(packed.sources[packed.slots], torch.arange(int(lengths.sum())))
