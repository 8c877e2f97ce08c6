"""Exact mode's building blocks: what a token gets does not depend on what runs beside it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from hpcrl.kernels.layers import rms_norm
from hpcrl.model import exact
from hpcrl.model.blocks.attention import Rope
from hpcrl.model.blocks.attention_modules import ExactPackedAttention, PackedAttention
from hpcrl.model.blocks.rope_angles import rope_cos_sin
from hpcrl.model.exact import KEYS, check_exact, exact_attention, exact_linear, exact_log_softmax
from hpcrl.model.gpt import pack
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.exits import InputError

SHAPE = ModelShape(
    num_layers=1,
    hidden_size=36,
    ffn_hidden_size=20,
    num_attention_heads=6,
    num_query_groups=2,
    head_dim=6,
    vocab_size=10,
)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seeded(one_thread: None) -> None:
    torch.manual_seed(0)


# Products (columns, rows of the weight) of models, whole and in tensor-parallel parts, and odd ones.
PRODUCTS = [
    (8, 16),
    (6, 8),
    (65, 1),
    (48, 10),
    (20, 36),
    (48, 50),
    (64, 32),
    (100, 3),
    (192, 64),
    (256, 768),
    (768, 256),
    (1000, 40),
    (4096, 48),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "outputs"), PRODUCTS)
def test_a_row_of_a_product_is_the_same_whatever_runs_beside_it(columns: int, outputs: int, dtype: torch.dtype) -> None:
    weight, x = torch.randn(outputs, columns).to(dtype), torch.randn(301, columns).to(dtype)
    whole = exact_linear(x, weight)
    assert whole.dtype == dtype
    torch.testing.assert_close(
        exact_linear(x, weight, torch.float32), (x.double() @ weight.double().T).float(), rtol=1e-4, atol=1e-3
    )
    for rows in range(1, 301, 1 if columns < 500 else 13):
        start = (7 * rows) % (301 - rows)
        assert torch.equal(exact_linear(x[start : start + rows], weight), whole[start : start + rows])
    shuffled = torch.randperm(301)
    assert torch.equal(exact_linear(x[shuffled].unsqueeze(1), weight).squeeze(1), whole[shuffled])
    # Weights lie anywhere in gradient and bucket buffers, and so at any address.
    moved = weight.new_empty(weight.numel() + 5)[5:].view_as(weight).copy_(weight)
    assert torch.equal(exact_linear(x, moved), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [20, 36, 64, 1000])
def test_so_are_norm_softmax_and_rotation(width: int, dtype: torch.dtype) -> None:
    """These need no form of their own; a torch in which they do would break exact mode."""
    x = torch.randn(200, width).to(dtype)
    positions = torch.arange(200)

    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    for function, whole in (
        (lambda x: rms_norm(x, torch.full((width,), 1.1, dtype=dtype), 1e-5), x),
        (lambda x: exact_log_softmax(x, width - 3, 0.7), x),
        (gated, x),
        (lambda at: torch.cat(rope_cos_sin(at, Rope(width, 10000.0)), -1), positions),
    ):
        expected = function(whole)
        for rows in range(1, 100):
            start = (7 * rows) % 100
            assert torch.equal(function(whole[start : start + rows]), expected[start : start + rows])


@pytest.mark.parametrize(
    ("heads", "width", "dtype"),
    [*((*size, torch.float32) for size in ((1, 6), (2, 10), (3, 16), (8, 64))), (3, 10, torch.bfloat16)],
)
def test_a_decoded_token_attends_with_the_bits_of_the_packed_one(heads: int, width: int, dtype: torch.dtype) -> None:
    """One sequence in a packed batch with longer ones; the same by prefill of a part and then token by token, from a
    cache that is longer still and full of what others left."""
    groups, lengths = 2, [KEYS + 9, 30, 2 * KEYS]
    longest = max(lengths)
    queries = torch.randn(3, groups, longest, heads, width).to(dtype)
    keys, values = torch.randn(2, 3, groups, longest, width).to(dtype)
    packed = exact_attention(queries, keys, values, torch.arange(longest)[None])
    for number, length in enumerate(lengths):
        cache = torch.full((2, 1, groups, 3 * KEYS + 5, width), 3.0, dtype=dtype)
        cache[:, 0, :, :length] = torch.stack((keys[number, :, :length], values[number, :, :length]))
        prompt = length // 3
        some = exact_attention(
            queries[number : number + 1, :, :prompt], *cache[:, :, :, :prompt], torch.arange(prompt)[None]
        )
        assert torch.equal(some[0], packed[number, :, :prompt])
        for place in range(prompt, length):
            one = queries[number : number + 1, :, place : place + 1]
            for cached in (length, cache.size(3)):
                found = exact_attention(one, *cache[:, :, :, :cached], torch.tensor([[place]]))
                assert torch.equal(found[0, :, 0], packed[number, :, place])


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_exact_attention_is_attention_and_so_are_its_gradients(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCRL_KERNELS", kernels)
    lengths = torch.tensor([5, 1, KEYS + 3, 3])
    total = int(lengths.sum())
    size = total + 4
    packed = pack(torch.arange(total), lengths, SHAPE, size=size)
    tensors = [torch.randn(size, heads, SHAPE.head_dim, requires_grad=True) for heads in (6, 2, 2)]
    weight = torch.randn(size, 36)
    results = []
    for attention in (PackedAttention(rope=SHAPE.rope), ExactPackedAttention(rope=SHAPE.rope)):
        output = attention(*tensors, None, packed_seq_params=packed)
        results.append((output, *torch.autograd.grad((output * weight).sum(), tensors)))
    for plain, of_exact in zip(*results, strict=True):
        torch.testing.assert_close(of_exact, plain, rtol=1e-5, atol=1e-5)


def test_where_exact_mode_cannot_hold_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check_exact(SHAPE, 1, dtype, CPU)
    torch.set_num_threads(2)
    with pytest.raises(InputError, match="OMP_NUM_THREADS=1"):
        check_exact(SHAPE, 1, torch.float32, CPU)
    torch.set_num_threads(1)
    monkeypatch.setattr(exact, "ROWS", 1)  # the rule that does not hold
    with pytest.raises(InputError, match="not bitwise the same"):
        check_exact(dataclasses.replace(SHAPE, hidden_size=256), 1, torch.float32, CPU)
