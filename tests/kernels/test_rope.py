from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hpcrl.kernels.layers import apply_rope
from hpcrl.model.blocks.attention import Rope
from hpcrl.model.blocks.rope_angles import rope_cos_sin
from hpcrl.rollout.engines.native.decoder import FastRotation, PlainRotation
from tests.kernels.close import DTYPES, assert_near

# no tokens, one, more than a program has; numbers of heads and widths that are no powers of 2
SHAPES = ((0, 2, 8), (1, 1, 2), (70, 1, 64), (5, 3, 24), (3, 20, 80), (4, 2, 3, 12))
THETA = 500.0


def angles(tokens: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """At positions that are packed: they start again."""
    return rope_cos_sin(torch.arange(tokens, device=device) % 7 * 5, Rope(head_dim, THETA))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Elements i and i + head_dim / 2 as a complex number, times that of the token; in fp64."""
    first, second = x.double().chunk(2, -1)
    turns = torch.complex(cos.double(), sin.double()).view(len(x), *[1] * (x.dim() - 2), x.size(-1) // 2)
    numbers = torch.complex(first, second) * turns
    return torch.cat((numbers.real, numbers.imag), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_backward(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    cos, sin = angles(shape[0], shape[-1], device)
    y = apply_rope(x, *(part.view(shape[0], *[1] * (len(shape) - 3), shape[-1] // 2) for part in (cos, sin)))
    assert y.dtype == dtype
    assert_near(y, turned(x.detach(), cos, sin), dtype)
    grad = torch.randn(shape, device=device).to(dtype)
    (found,) = torch.autograd.grad(y, x, grad)
    assert_near(found, turned(grad, cos, -sin), dtype)


def test_heads_that_lie_apart(device: torch.device) -> None:
    """The queries and the key of each group in a matrix of queries, keys and values, and a gradient in another order;
    nothing of the matrix beside them is read into the result."""
    mixed = torch.full((9, 2, 6, 16), float("nan"), device=device)
    heads = mixed[:, :, 1:-1].normal_()
    cos, sin = angles(9, 16, device)
    leaf = heads.detach().requires_grad_()
    y = apply_rope(leaf, cos[:, None], sin[:, None])
    assert y.is_contiguous()
    assert_near(y, turned(heads, cos, sin), heads.dtype)
    grad = torch.randn(4, 2, 9, 16, device=device).transpose(0, 2)
    assert_near(torch.autograd.grad(y, leaf, grad)[0], turned(grad, cos, -sin), heads.dtype)
    crossed = torch.randn(9, 16, 3, device=device).transpose(1, 2)
    assert_near(apply_rope(crossed, cos, sin), turned(crossed, cos, sin), heads.dtype)


def test_turning_back_gives_what_was_there_and_products_know_the_distance_alone(device: torch.device) -> None:
    cos, sin = rope_cos_sin(torch.arange(40, device=device), Rope(32, THETA))
    x = torch.randn(40, 3, 32, device=device)
    assert_near(apply_rope(apply_rope(x, cos, sin), cos, -sin), x, x.dtype)
    query, key = (apply_rope(torch.randn(32, device=device).expand(40, 1, 32), cos, sin).squeeze(1) for _ in range(2))
    products = query @ key.T
    for distance in (0, 1, 20):
        along = products.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=0, atol=1e-4)


@pytest.mark.parametrize("width", [8, 4])
def test_the_native_engine_turns_as_the_training_model(
    width: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions, heads = torch.randint(1000, (11,), device=device), torch.randn(11, 2, 4, 8, device=device)[:, :, :3]
    rope = Rope(width, 1e4)
    turns = [kind(positions)(heads, rope) for kind in (FastRotation, PlainRotation)]
    assert torch.equal(*turns)
    monkeypatch.setenv("HPCRL_KERNELS", "torch")
    for kind in (FastRotation, PlainRotation):
        assert_near(kind(positions)(heads, rope), turns[0], heads.dtype)
    assert torch.equal(turns[0][..., width:], heads[..., width:])


def test_the_largest_numbers_and_infinities(device: torch.device) -> None:
    cos, sin = angles(3, 4, device)
    x = torch.tensor([3e38, 0.0, 1e-38, -3e38], device=device).expand(3, 2, 4)
    assert_near(apply_rope(x, cos * 0.5, sin * 0.5), turned(x, cos * 0.5, sin * 0.5), x.dtype)
    x = torch.tensor([0.0, torch.inf, 1.0, 1.0], device=device).expand(3, 2, 4)
    found = apply_rope(x, cos, sin)
    assert torch.equal(found.isfinite(), torch.tensor([True, False, True, False], device=device).expand_as(x))


def test_an_odd_width_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="head_dim=3 is odd"):
        apply_rope(torch.ones(2, 1, 3, device=device), torch.ones(2, 1, device=device), torch.ones(2, 1, device=device))
