from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcrl.kernels import state_space as module
from hpcrl.kernels.dispatch import library
from hpcrl.kernels.state_space import state_space, state_space_step
from tests.kernels.close import assert_near

LENGTHS = [70, 1, 150, 64, 3]
GROUPS, HEADS, WIDTH, STATE = 2, 4, 12, 20


def made(lengths: list[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, dt, rate, b, c, skip, and a state of each sequence."""
    tokens, generator = sum(lengths), torch.Generator().manual_seed(len(lengths))
    sizes = (tokens, HEADS, WIDTH), (tokens, HEADS), (tokens, GROUPS, STATE), (tokens, GROUPS, STATE), (HEADS,)
    x, dt, b, c, skip = (torch.randn(size, generator=generator, dtype=dtype) for size in sizes)
    dt = torch.nn.functional.softplus(dt)
    # from a state that keeps all to one that forgets at once, so fast that products of its factors would overflow
    rate = -torch.tensor([1e-3, 0.1, 1.0, 30.0], dtype=dtype)
    state = torch.randn(len(lengths), HEADS, WIDTH, STATE, generator=generator, dtype=dtype)
    return [each.requires_grad_() for each in (x, dt, rate, b, c, skip, state)]


def plain(*inputs: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Token by token, as the paper writes it (section 2.1, with the discretisation of Mamba)."""
    x, dt, rate, b, c, skip, states = inputs
    b, c = (part.repeat_interleave(HEADS // GROUPS, 1) for part in (b, c))
    outputs, last, token = [], [], 0
    for length, state in zip(lengths, states, strict=True):
        for _ in range(length):
            decay, step = (dt[token] * rate).exp()[:, None, None], dt[token][:, None, None]
            state = decay * state + step * x[token][:, :, None] * b[token][:, None]
            outputs.append((state @ c[token][:, :, None]).squeeze(-1) + skip[:, None] * x[token])
            token += 1
        last.append(state)
    return torch.stack(outputs), torch.stack(last)


def test_outputs_states_and_gradients_are_those_of_the_recurrence() -> None:
    inputs = made(LENGTHS)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    found = state_space(*inputs[:6], LENGTHS, inputs[6])
    expected = plain(*exact, lengths=LENGTHS)
    weights = [torch.randn(each.shape, generator=torch.Generator().manual_seed(3)) for each in found]
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other, torch.float32)
    wanted = torch.autograd.grad(expected, exact, [weight.double() for weight in weights])
    for one, other in zip(torch.autograd.grad(found, inputs, weights), wanted, strict=True):
        assert_near(one, other, torch.float32)


def test_only_inputs_are_kept() -> None:
    kept, inputs = list[Tensor](), made(LENGTHS)[:6]

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        state_space(*inputs, LENGTHS)
    assert {tensor.data_ptr() for tensor in kept} <= {tensor.data_ptr() for tensor in inputs}


def test_each_sequence_is_computed_as_if_it_were_alone() -> None:
    x, dt, rate, b, c, skip, _ = (each.detach() for each in made(LENGTHS))
    found = state_space(x, dt, rate, b, c, skip, LENGTHS)
    for number, length in enumerate(LENGTHS):
        own = slice(sum(LENGTHS[:number]), sum(LENGTHS[: number + 1]))
        alone = state_space(x[own], dt[own], rate, b[own], c[own], skip, [length])
        # Chunks differ, and so do the sums of large rates whose differences are taken.
        torch.testing.assert_close(found[0][own], alone[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[1][number], alone[1][0], rtol=1e-4, atol=1e-4)


def test_parts_and_single_tokens_continue_a_sequence() -> None:
    """A prompt in two parts, then token by token, in a batch of two."""
    x, dt, rate, b, c, skip, state = (each.detach() for each in made([100, 100]))
    whole, last = state_space(x, dt, rate, b, c, skip, [100, 100], state)
    x, dt, b, c = (each.unflatten(0, (2, 100)) for each in (x, dt, b, c))
    outputs = []
    for part in (slice(0, 66), slice(66, 95)):
        length = part.stop - part.start
        own = [each[:, part].flatten(0, 1) for each in (x, dt, b, c)]
        found, state = state_space(*own[:2], rate, *own[2:], skip, [length] * 2, state)
        outputs.append(found.unflatten(0, (2, length)))
    for token in range(95, 100):
        own = [each[:, token] for each in (x, dt, b, c)]
        found, state = state_space_step(*own[:2], rate, *own[2:], skip, state)
        outputs.append(found.unsqueeze(1))
    torch.testing.assert_close(torch.cat(outputs, 1).flatten(0, 1), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)


def test_bf16_is_computed_in_fp32() -> None:
    x, dt, rate, b, c, skip, _ = (each.detach() for each in made(LENGTHS))
    x, b, c = (each.bfloat16() for each in (x, b, c))
    found = state_space(x, dt, rate, b, c, skip, LENGTHS)
    expected = state_space(x.float(), dt, rate, b.float(), c.float(), skip, LENGTHS)
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == torch.float32
    torch.testing.assert_close(found[0], expected[0].bfloat16())
    assert torch.equal(found[1], expected[1])


def mamba_chunk_scan_combined(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor, **options: Any
) -> Any:
    """The signature of mamba-ssm's kernel, as far as it is used; computes on the CPU."""
    before, ids = options.pop("initial_states", None), options.pop("seq_idx", torch.zeros(x.shape[:2]))
    lengths = ids.squeeze(0).unique_consecutive(return_counts=True)[1].tolist()
    if before is None:
        before = x.new_zeros(len(lengths), *x.shape[2:], B.size(3))
    output, last = plain(x[0], dt[0], A, B[0], C[0], D, before, lengths=lengths)
    wants_last = options.pop("return_final_states", False) and len(lengths) == 1
    if options.pop("return_varlen_states", False):
        assert options.pop("cu_seqlens").diff().tolist() == lengths
        wants_last = True
    assert not options
    return (output.unsqueeze(0), last) if wants_last else output.unsqueeze(0)


def selective_state_update(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    ones = [1] * len(x)
    output, last = plain(x, dt[:, :, 0], A[:, 0, 0], B, C, D[:, 0], state.clone(), lengths=ones)
    state.copy_(last)
    return output


def test_mamba_ssm_gets_what_torch_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [9, 1, 3]
    x, dt, rate, b, c, skip, state = inputs = [each.detach() for each in made(lengths)]
    single = x[:3], dt[:3], rate, b[:3], c[:3], skip, state

    @torch.no_grad()
    def computed() -> list[Tensor | None]:
        parts = *inputs[:6], lengths
        return [*state_space(*parts), *state_space(*parts, state), *state_space_step(*single)]

    expected, before = computed(), state.clone()
    for name, function in ((module.SCAN, mamba_chunk_scan_combined), (module.STEP, selective_state_update)):
        fake = ModuleType(name)
        setattr(fake, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(module, "is_fused", lambda x, b: True)
    library.cache_clear()
    found = computed()
    trained = state_space(*inputs[:6], lengths)
    library.cache_clear()
    for one, other in zip((*found, trained[0]), (*expected, expected[0]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert trained[1] is None and torch.equal(state, before)
