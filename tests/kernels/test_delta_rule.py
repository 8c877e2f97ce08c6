from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcrl.kernels import delta_rule
from hpcrl.kernels.delta_rule import gated_delta_rule, gated_delta_step
from hpcrl.kernels.dispatch import library
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
    library.cache_clear()
    found = gated_delta_rule(*inputs[:5], [9, 1, 3], inputs[5]), gated_delta_step(*single)
    library.cache_clear()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
