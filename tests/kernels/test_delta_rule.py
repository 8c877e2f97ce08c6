from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcrl.kernels import delta_rule
from hpcrl.kernels.delta_rule import causal_conv, gated_delta_rule, gated_delta_step
from tests.kernels.close import assert_near

LENGTHS = [70, 1, 150, 64, 3]
KEY_HEADS, HEADS, KEY, VALUE = 2, 4, 12, 20


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def made(lengths: list[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """query, key, value, log_decay, beta, and a state of each sequence."""
    tokens, generator = sum(lengths), torch.Generator().manual_seed(len(lengths))
    sizes = (tokens, KEY_HEADS, KEY), (tokens, KEY_HEADS, KEY), (tokens, HEADS, VALUE), (tokens, HEADS)
    query, key, value, decay = (torch.randn(size, generator=generator, dtype=dtype) for size in sizes)
    # from a decay that forgets at once to one that keeps all, so strong that products of its factors would overflow
    decay = -torch.nn.functional.softplus(decay) * torch.tensor([1e-3, 0.1, 1.0, 30.0], dtype=dtype)
    beta = torch.rand(tokens, HEADS, generator=generator, dtype=dtype)
    state = torch.randn(len(lengths), HEADS, KEY, VALUE, generator=generator, dtype=dtype)
    return [each.requires_grad_() for each in (query, key, value, decay, beta, state)]


def plain(*inputs: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Token by token, as the paper writes it (eq. 10), with S of (value_dim, key_dim)."""
    query, key, value, decay, beta, states = inputs
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query, key = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (query / KEY**0.5, key))
    outputs, last, token = [], [], 0
    for length, state in zip(lengths, states.transpose(-1, -2), strict=True):
        for _ in range(length):
            k, b = key[token], beta[token, :, None, None]
            forget = torch.eye(KEY, dtype=k.dtype) - b * k[:, :, None] * k[:, None]
            state = decay[token].exp()[:, None, None] * state @ forget + b * value[token][:, :, None] * k[:, None]
            outputs.append((state @ query[token][:, :, None]).squeeze(-1))
            token += 1
        last.append(state.transpose(-1, -2))
    return torch.stack(outputs), torch.stack(last)


def test_outputs_states_and_gradients_are_those_of_the_recurrence() -> None:
    inputs = made(LENGTHS)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    found = gated_delta_rule(*inputs[:5], LENGTHS, inputs[5])
    expected = plain(*exact, lengths=LENGTHS)
    weights = [torch.randn_like(each) for each in found]
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other, torch.float32)
    wanted = torch.autograd.grad(expected, exact, [weight.double() for weight in weights])
    for one, other in zip(torch.autograd.grad(found, inputs, weights), wanted, strict=True):
        assert_near(one, other, torch.float32)


def test_each_sequence_is_computed_as_if_it_were_alone() -> None:
    inputs = [each.detach() for each in made(LENGTHS)]
    found = gated_delta_rule(*inputs[:5], LENGTHS)
    for number, length in enumerate(LENGTHS):
        own = slice(sum(LENGTHS[:number]), sum(LENGTHS[: number + 1]))
        alone = gated_delta_rule(*(each[own] for each in inputs[:5]), [length])
        torch.testing.assert_close(found[0][own], alone[0])
        torch.testing.assert_close(found[1][number], alone[1][0])


def test_parts_and_single_tokens_continue_a_sequence() -> None:
    """A prompt in two parts, then token by token, in a batch of two."""
    inputs = [each.detach() for each in made([100, 100])]
    whole, last = gated_delta_rule(*inputs[:5], [100, 100], inputs[5])
    by_sequence = [each.unflatten(0, (2, 100)) for each in inputs[:5]]
    outputs, state = [], inputs[5]
    for part in (slice(0, 66), slice(66, 95)):
        length = part.stop - part.start
        found, state = gated_delta_rule(*(each[:, part].flatten(0, 1) for each in by_sequence), [length] * 2, state)
        outputs.append(found.unflatten(0, (2, length)))
    for token in range(95, 100):
        found, state = gated_delta_step(*(each[:, token] for each in by_sequence), state)
        outputs.append(found.unsqueeze(1))
    torch.testing.assert_close(torch.cat(outputs, 1).flatten(0, 1), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)


def test_bf16_is_computed_in_fp32() -> None:
    inputs = [each.detach() for each in made(LENGTHS)]
    halves = [each.bfloat16() for each in inputs[:3]]
    found = gated_delta_rule(*halves, *inputs[3:5], LENGTHS)
    expected = gated_delta_rule(*(each.float() for each in halves), *inputs[3:5], LENGTHS)
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == torch.float32
    torch.testing.assert_close(found[0], expected[0].bfloat16())
    assert torch.equal(found[1], expected[1])


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


class Fla(ModuleType):
    """Has the signatures of fla's kernels, as far as they are used, and computes on the CPU."""

    def chunk_gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, cu_seqlens: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        assert options.pop("use_qk_l2norm_in_kernel") and options.pop("output_final_state")
        lengths, state = cu_seqlens.diff().tolist(), options.pop("initial_state")
        assert not options
        parts = (part.squeeze(0).float() for part in (q, k, v, g, beta))
        output, last = plain(*parts, state, lengths=lengths)
        return output.unsqueeze(0).to(v.dtype), last

    def fused_recurrent_gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, beta: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        bounds = torch.arange(len(q) + 1)
        parts = (part.transpose(0, 1) for part in (q, k, v, g, beta))
        output, last = self.chunk_gated_delta_rule(*parts, cu_seqlens=bounds, **options)
        return output.transpose(0, 1), last


def test_fla_gets_what_torch_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [each.detach() for each in made([9, 1, 3])]
    single = [*(each[:3] for each in inputs[:5]), inputs[5]]
    expected = gated_delta_rule(*inputs[:5], [9, 1, 3], inputs[5]), gated_delta_step(*single)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", Fla("fla.ops.gated_delta_rule"))
    monkeypatch.setattr(delta_rule, "is_fused", lambda query, key: True)
    delta_rule._fla.cache_clear()
    found = gated_delta_rule(*inputs[:5], [9, 1, 3], inputs[5]), gated_delta_step(*single)
    delta_rule._fla.cache_clear()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_fla_runs_only_on_gpus_that_it_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = delta_rule._reason.__wrapped__
    for fla, dtype, why in (
        (object(), torch.bfloat16, ""),
        (object(), torch.float32, "no library for torch.float32"),
        (None, torch.bfloat16, "fla-core is not installed"),
    ):
        monkeypatch.setattr(delta_rule, "_fla", lambda found=fla: found)
        assert reason("auto", "cuda", dtype, 128).startswith(why) and bool(why) == bool(
            reason("auto", "cuda", dtype, 128)
        )
    assert reason("torch", "cuda", torch.bfloat16, 128) == "HPCRL_KERNELS=torch"
    assert reason("auto", "cpu", torch.bfloat16, 128)


def test_a_library_that_needs_a_driver_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "fla" / "ops").mkdir(parents=True)
    for folder in ("fla", "fla/ops"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "fla" / "ops" / "gated_delta_rule.py").write_text("raise RuntimeError('0 active drivers')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    assert delta_rule._fla.__wrapped__() is None
