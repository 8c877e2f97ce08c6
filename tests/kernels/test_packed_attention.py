from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcrl.kernels import packed_attention as kernel
from hpcrl.kernels.chips import chip
from hpcrl.kernels.packed_attention import Sequences, packed_attention
from hpcrl.model.blocks.attention_modules import PackedAttention
from hpcrl.model.gpt import pack
from hpcrl.model.shape import ModelShape
from tests.kernels.close import DTYPES, assert_near

LENGTHS = np.array([5, 1, 9, 0, 17])
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: np.ndarray,
    scale: float,
    window: int = 1000,
    sinks: Tensor | None = None,
) -> Tensor:
    """In fp64, one sequence at a time, with all pairs of tokens."""
    times = query.size(1) // key.size(1)
    outputs = []
    for q, k, v in zip(*(part.double().split(lengths.tolist()) for part in (query, key, value)), strict=True):
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) * scale
        every = torch.ones_like(scores, dtype=torch.bool)
        scores = scores.masked_fill(every.triu(1) | every.tril(-window), -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(*scores.shape[:2], 1)], -1)
        outputs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., : len(k)], v))
    return torch.cat(outputs)


def made(dtype: torch.dtype, heads: int, groups: int, key_dim: int, value_dim: int, tokens: int) -> list[Tensor]:
    sizes = (heads, key_dim), (groups, key_dim), (groups, value_dim)
    return [torch.randn(tokens, *size, device=DEVICE).to(dtype).requires_grad_() for size in sizes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups", "key_dim", "value_dim"), [(2, 2, 64, 64), (6, 2, 24, 16), (4, 1, 12, 12)])
def test_forward_and_backward(dtype: torch.dtype, heads: int, groups: int, key_dim: int, value_dim: int) -> None:
    """By a library on a GPU for the first two shapes in 16 bits, else padded."""
    inputs = made(dtype, heads, groups, key_dim, value_dim, int(LENGTHS.sum()))
    found = packed_attention(*inputs, Sequences.of(LENGTHS, DEVICE), 0.3)
    expected = exact(*inputs, LENGTHS, 0.3)
    assert found.dtype == dtype
    assert_near(found, expected, dtype)
    grad = torch.randn_like(found)
    wanted = torch.autograd.grad(expected, inputs, grad.double())
    for one, other in zip(torch.autograd.grad(found, inputs, grad), wanted, strict=True):
        assert_near(one, other, dtype, factor=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 4, 12])
def test_a_sink_is_one_more_score_without_a_value(dtype: torch.dtype, window: int | None) -> None:
    inputs = made(dtype, 6, 2, 24, 16, int(LENGTHS.sum()))
    sinks = torch.linspace(-3.0, 3.0, 6, device=DEVICE).to(dtype).requires_grad_()
    found = packed_attention(*inputs, Sequences.of(LENGTHS, DEVICE), 0.3, window, sinks)
    expected = exact(*inputs, LENGTHS, 0.3, window or 1000, sinks)
    assert_near(found, expected, dtype, factor=2)
    grad = torch.randn_like(found)
    wanted = torch.autograd.grad(expected, (*inputs, sinks), grad.double())
    for one, other in zip(torch.autograd.grad(found, (*inputs, sinks), grad), wanted, strict=True):
        assert_near(one, other, dtype, factor=3)


def test_the_installed_torch_takes_what_it_is_given() -> None:
    library = kernel._library()
    if library is None:
        pytest.skip("no library is installed")
    query, key = (
        torch.empty(9, heads, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for heads in (4, 2)
    )
    found = library(query, key, key, torch.empty(3, dtype=torch.int32, device="meta"), 6, 0.3, None)
    assert found.shape == query.shape
    grads = torch.autograd.grad(found.sum(), (query, key))
    assert [grad.shape for grad in grads] == [query.shape, key.shape]


def test_training_with_a_library_is_training_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU with one that is written here."""
    shape = ModelShape(1, 32, 32, num_attention_heads=4, num_query_groups=2, head_dim=8, vocab_size=10)
    lengths, size = torch.tensor([5, 1, 9]), 24
    packed = pack(torch.arange(15), lengths, shape, size=size)
    tensors = [torch.randn(size, heads, width, requires_grad=True) for heads, width in ((4, 8), (2, 8), (2, 6))]
    weight = torch.randn(size, 24)

    def run() -> tuple[Tensor, ...]:
        output = PackedAttention(softmax_scale=0.3, rope=shape.rope)(*tensors, None, packed_seq_params=packed)
        return output, *torch.autograd.grad((output * weight).sum(), tensors)

    def library(
        q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float | None, window: int | None
    ) -> Tensor:
        assert window is None
        assert bounds.dtype == torch.int32
        assert longest == 9
        return exact(q, k, v, bounds.diff().numpy(), scale or 1.0).float()

    expected = run()
    monkeypatch.setattr("hpcrl.model.blocks.attention_modules.is_fused", lambda query: True)
    monkeypatch.setattr(kernel, "is_fused", lambda query: True)
    monkeypatch.setattr(kernel, "_library", lambda: library)
    for one, other in zip(run(), expected, strict=True):
        assert_near(one, other, torch.float32)


class Flash3(ModuleType):
    """Has the signature of FlashAttention 3, as far as it is used, and computes on the CPU."""

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None = None,
        causal: bool = False,
        deterministic: bool = False,
    ) -> tuple[Tensor, Tensor]:
        assert causal and torch.equal(cu_seqlens_q, cu_seqlens_k) and max_seqlen_q == max_seqlen_k
        return exact(q, k, v, cu_seqlens_q.diff().numpy(), softmax_scale or 1.0), torch.zeros(1)


def test_flash_attention_3_comes_first_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", Flash3("flash_attn_interface"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    query, key, value = (part.detach().cpu() for part in made(torch.float32, 4, 2, 8, 8, int(LENGTHS.sum())))
    sequences = Sequences.of(LENGTHS, torch.device("cpu"))
    for name, is_first in (("sm_90", True), ("sm_80", False), ("gfx942", False)):
        monkeypatch.setattr(kernel, "chip_of", lambda device, name=name: chip(name))
        library = kernel._library.__wrapped__()
        assert (library is not None and "of_flash_attention" in library.__qualname__) == is_first
        if is_first:
            found = library(query, key, value, sequences.bounds, sequences.longest, 0.3, None)
            assert torch.equal(found, exact(query, key, value, LENGTHS, 0.3))
