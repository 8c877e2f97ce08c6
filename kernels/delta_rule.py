"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464) over several consecutive sequences, with a state of each
sequence before and after its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hpcrl.kernels import DELTA_CHUNK
from hpcrl.kernels.chunks import Chunks, by_chunk, chunks_of, decays, inside
from hpcrl.kernels.dispatch import library, use_library

FLA = "fla.ops.gated_delta_rule"
NORM_EPS = 1e-6
MAX_KEY_WIDTH = 256  # of a head in fla's kernels


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    lengths: Sequence[int],
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o_t = S_t q_t with S_t = exp(log_decay_t) S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, for the
    tokens t of each sequence, and the last S of each.

    Query, key and value are fp32, bf16 or fp16; the output has the size and dtype of `value`. Computed in fp32, in
    chunks of up to 32 tokens (section 3.3): about heads (6 key_dim value_dim + 4 chunk (key_dim + value_dim))
    operations a token, three times as many backward, where the chunks are computed again: only inputs are kept.

    On CUDA by fla (`fla-core`) if it is installed; not run, because no machine with a GPU had it.

    Args:
        query, key: (T, key heads, key_dim); they are divided by their length, queries by sqrt(key_dim) too.
        value: (T, heads, value_dim), consecutive heads of a key head.
        log_decay, beta: (T, heads) fp32.
        lengths: tokens of the sequences, T in all.
        state: S^T before the first token of each, (sequences, heads, key_dim, value_dim) fp32; None: 0.
    """
    if is_fused(query, key):
        bounds = torch.tensor([0, *np.cumsum(lengths).tolist()], device=query.device)
        packed = (part.unsqueeze(0) for part in (query, key, value, log_decay, beta))
        options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        output, last = library(FLA).chunk_gated_delta_rule(*packed, cu_seqlens=bounds, **options)
        return output.squeeze(0), last
    tensors = query, key, value, log_decay, beta, state, chunks_of(tuple(lengths), DELTA_CHUNK, query.device)
    if torch.is_grad_enabled():
        return checkpoint(_in_chunks, *tensors, use_reentrant=False, preserve_rng_state=False)
    return _in_chunks(*tensors)


def gated_delta_step(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the same for one token of each sequence, without gradients: moves each state in and out once.

    On CUDA by fla if it is installed; not run.
    """
    if is_fused(query, key):
        tensors = [part.unsqueeze(1) for part in (query, key, value, log_decay)]
        options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        output, last = library(FLA).fused_recurrent_gated_delta_rule(*tensors, beta=beta.unsqueeze(1), **options)
        return output.squeeze(1), last
    query, key, times = _unit(query), _unit(key), value.size(1) // key.size(1)
    both = torch.stack((key, query * query.size(-1) ** -0.5), 2).repeat_interleave(times, 1).flatten(0, 1)
    key, query = both.split(1, 1)
    after = (state * log_decay.exp()[..., None, None]).flatten(0, 1)
    said, read = torch.bmm(both, after).split(1, 1)
    change = beta.reshape(-1, 1, 1) * (value.flatten(0, 1).unsqueeze(1).to(state.dtype) - said)
    output = torch.addcmul(read, (query * key).sum(-1, keepdim=True), change)
    after.baddbmm_(key.transpose(1, 2), change)
    return output.view(value.shape).to(value.dtype), after.view(state.shape)


def is_fused(query: Tensor, key: Tensor) -> bool:
    """Whether fla's kernels run for such heads."""
    width = key.size(-1)
    unless = f"heads of {width} are wider than {MAX_KEY_WIDTH}" if width > MAX_KEY_WIDTH else ""
    return use_library("gated_delta_rule", FLA, query, unless=unless)


def _unit(x: Tensor) -> Tensor:
    """Divide the vectors of the last dimension by their length."""
    x = x.to(inside(x))
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def _in_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
    chunks: Chunks,
) -> tuple[Tensor, Tensor]:
    """The rule in a few products of all chunks, and three for each step of `_Scan`.

    In a chunk let c_i = exp(the sum of log_decay up to token i), and U_i = beta_i (v_i - the value that S has for k_i).
    Then (I + L) U = beta v - beta c (K S), where L_ij = beta_i c_i / c_j k_i k_j for j < i.
    """
    heads, times, dtype = value.size(1), value.size(1) // key.size(1), inside(value)
    if state is None:
        state = value.new_zeros(len(chunks.order), heads, key.size(2), value.size(2), dtype=dtype)
    queries = by_chunk(_unit(query) * query.size(-1) ** -0.5, chunks)
    keys, values = by_chunk(_unit(key), chunks), by_chunk(value.to(dtype), chunks)
    decay, betas = (by_chunk(part.unsqueeze(-1), chunks) for part in (log_decay, beta))
    ratios, to_end, from_start = decays(decay)
    ratios = ratios.squeeze(1)
    inverse = _Inverse.apply(_repeated(keys @ keys.transpose(1, 2), times, heads) * ratios * betas)
    attended = _repeated(queries @ keys.transpose(1, 2), times, heads) * ratios
    queries, keys = _repeated(queries, times, heads), _repeated(keys, times, heads)
    updates, starts, last = _Scan.apply(
        inverse,
        keys,
        values * betas,
        from_start * betas,
        to_end,
        from_start[:, -1:],
        state.index_select(0, chunks.order).flatten(0, 1),
        [count * heads for count in chunks.steps],
    )
    outputs = torch.baddbmm(attended @ updates, queries * from_start, starts)
    outputs = outputs.unflatten(0, (-1, heads)).transpose(1, 2).flatten(0, 1).index_select(0, chunks.slots)
    return outputs.to(value.dtype), last.unflatten(0, (-1, heads)).index_select(0, chunks.place)


def _repeated(x: Tensor, times: int, heads: int) -> Tensor:
    """(chunks x key heads, ...) -> (chunks x heads, ...)"""
    return x if times == 1 else x.repeat_interleave(times, 0)


class _Inverse(torch.autograd.Function):
    """Return the inverse of I + L, where L is what `x` has below its diagonal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        eye = torch.eye(x.size(-1), dtype=x.dtype, device=x.device)
        found = torch.linalg.solve_triangular(x, eye, upper=False, unitriangular=True)
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (found,) = ctx.saved_tensors
        back = found.transpose(1, 2)
        return -(back @ grad @ back).tril_(-1)


class _Scan(torch.autograd.Function):
    """Compute U = T (V - c (K S)) of each chunk, and S <- g S + K^T (d U), step by step.

    T `inverse` (B, w, w), K `keys` (B, w, key_dim), V `values` (B, w, value_dim), c `seen` and d `to_end` (B, w, 1), g
    `whole` (B, 1, 1): B chunks x heads, of which step n has the next `steps[n]`, those of the first states. Returns U,
    each chunk's S before it, and the last S (sequences x heads, key_dim, value_dim).
    """

    @staticmethod
    def forward(
        ctx: Any,
        inverse: Tensor,
        keys: Tensor,
        values: Tensor,
        seen: Tensor,
        to_end: Tensor,
        whole: Tensor,
        state: Tensor,
        steps: list[int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        said, rest, updates = (torch.empty_like(values) for _ in range(3))
        starts, last = values.new_empty(len(keys), *state.shape[1:]), state.clone()
        tensors = inverse, keys, keys.transpose(1, 2), values, seen, to_end, whole, said, rest, updates, starts
        for t, k, back, v, c, d, g, s, r, u, start in zip(*(each.split(steps) for each in tensors), strict=True):
            now = last[: len(k)]
            start.copy_(now)
            torch.bmm(k, start, out=s)
            torch.addcmul(v, c, s, value=-1, out=r)
            torch.bmm(t, r, out=u)
            torch.baddbmm(start * g, back, u * d, out=now)
        ctx.save_for_backward(inverse, keys, seen, to_end, whole, said, rest, updates, starts)
        ctx.steps = steps
        return updates, starts, last

    @staticmethod
    def backward(ctx: Any, grad_updates: Tensor, grad_starts: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
        """Two products for each step, the others for all chunks at once. `after` is the gradient of S after a chunk."""
        inverse, keys, seen, to_end, whole, said, rest, updates, starts = ctx.saved_tensors
        grad_updates, after, grad = grad_updates.clone(), torch.empty_like(starts), grad_last.clone()
        grad_rest, of_keys = torch.empty_like(rest), torch.empty_like(rest)
        tensors = inverse.transpose(1, 2), keys, keys.transpose(1, 2), seen, to_end, whole
        grads = grad_starts, grad_updates, after, of_keys, grad_rest
        by_step = list(zip(*(each.split(ctx.steps) for each in (*tensors, *grads)), strict=True))
        for t, k, back, c, d, g, from_outputs, grad_u, later, s, grad_r in reversed(by_step):
            now = grad[: len(k)]
            later.copy_(now)
            torch.bmm(k, later, out=s)
            grad_u.addcmul_(d, s)
            torch.bmm(t, grad_u, out=grad_r)
            torch.baddbmm(torch.addcmul(from_outputs, later, g), back, grad_r * c, alpha=-1, out=now)
        grad_keys = (updates * to_end) @ after.transpose(1, 2)
        grad_keys.baddbmm_(grad_rest * seen, starts.transpose(1, 2), alpha=-1)
        return (
            grad_updates @ rest.transpose(1, 2),
            grad_keys,
            grad_rest,
            -(grad_rest * said).sum(-1, keepdim=True),
            (of_keys * updates).sum(-1, keepdim=True),
            (starts * after).sum((1, 2), keepdim=True),
            grad,
            None,
        )
