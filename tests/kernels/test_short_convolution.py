from __future__ import annotations

import pytest
import torch

from hpcrl.kernels.short_convolution import causal_conv


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_convolution_is_torchs_of_each_sequence(has_bias: bool) -> None:
    lengths, channels, width = [5, 1, 2, 9], 6, 4
    x, weight = (torch.randn(size, requires_grad=True) for size in ((17, channels), (channels, width)))
    state = torch.randn(4, width - 1, channels, requires_grad=True)
    bias = torch.randn(channels, requires_grad=True) if has_bias else None
    found, last = causal_conv(x, weight, lengths, state, bias)
    expected, windows = [], []
    for before, own in zip(state, x.split(lengths), strict=True):
        joined = torch.cat([before, own]).t()[None]
        sums = torch.nn.functional.conv1d(joined, weight[:, None], bias, groups=channels)
        expected.append(torch.nn.functional.silu(sums[0].t()))
        windows.append(joined[0].t()[-width + 1 :])
    torch.testing.assert_close(found, torch.cat(expected))
    assert torch.equal(last, torch.stack(windows))
    over = torch.randn_like(found)
    inputs = [x, weight, state, *([bias] if bias is not None else [])]
    wanted = torch.autograd.grad((torch.cat(expected) * over).sum(), inputs)
    for one, other in zip(torch.autograd.grad((found * over).sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)

    whole, _ = causal_conv(x[:5], weight, [5])
    first, then = causal_conv(x[:4], weight, [4])
    step, _ = causal_conv(x[4:5], weight, None, then)
    torch.testing.assert_close(torch.cat([first, step]), whole)


def test_the_convolution_of_bf16_is_rounded_once() -> None:
    x, weight = torch.randn(9, 6).bfloat16(), torch.randn(6, 4).bfloat16().requires_grad_()
    (found, last), (exact, _) = causal_conv(x, weight, [5, 4]), causal_conv(x.float(), weight.float(), [5, 4])
    assert torch.equal(found, exact.bfloat16()) and last.dtype == torch.bfloat16
    step, _ = causal_conv(x[4:5], weight, None, x[None, 1:4].float())
    assert torch.equal(step[0], found[4])
    (grad,) = torch.autograd.grad(found.float().square().sum(), weight)
    (wanted,) = torch.autograd.grad(exact.square().sum(), weight)
    torch.testing.assert_close(grad, wanted, rtol=0.05, atol=0.05)
