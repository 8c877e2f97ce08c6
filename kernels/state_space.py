"""Mamba-2's state space recurrence (Dao and Gu 2024, arXiv:2405.21060) over several consecutive sequences, with a state
of each sequence before and after its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hpcrl.kernels import CHUNK
from hpcrl.kernels.chunks import Chunks, by_chunk, chunks_of, decays, inside
from hpcrl.kernels.dispatch import library, use_library

SCAN, STEP = (f"mamba_ssm.ops.triton.{name}" for name in ("ssd_combined", "selective_state_update"))
FUSED_CHUNK = 256  # tokens of a chunk in mamba-ssm's kernel
MAX_STATE_DIM = 256  # in mamba-ssm's kernels


def state_space(
    x: Tensor,
    dt: Tensor,
    rate: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    lengths: Sequence[int],
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return y_t = S_t c_t + skip x_t with S_t = exp(dt_t rate) S_{t-1} + dt_t x_t b_t^T, for the tokens t of each
    sequence, and the last S of each.

    x, b and c are fp32, bf16 or fp16; the output has the size and dtype of `x`. Computed in fp32, in chunks of up to 64
    tokens (section 6): about heads (4 head_dim state_dim + 2 chunk head_dim) + 2 groups chunk state_dim operations a
    token, three times as many backward, where the chunks are computed again: only inputs are kept.

    On CUDA by `mamba-ssm` if it is installed; not run, because no machine with a GPU had it. Its kernel does not return
    the last states if it has gradients; they are None then.

    Args:
        x: (T, heads, head_dim).
        dt: (T, heads) fp32.
        rate, skip: (heads,) fp32, rates are negative.
        b, c: (T, groups, state_dim), each for consecutive heads.
        lengths: tokens of the sequences, T in all.
        state: S before the first token of each, (sequences, heads, head_dim, state_dim) fp32; None: 0.
    """
    if is_fused(x, b):
        return _fused(x, dt, rate, b, c, skip, lengths, state)
    tensors = x, dt, rate, b, c, skip, state, chunks_of(tuple(lengths), CHUNK, x.device)
    if torch.is_grad_enabled():
        return checkpoint(_in_chunks, *tensors, use_reentrant=False, preserve_rng_state=False)
    return _in_chunks(*tensors)


def state_space_step(
    x: Tensor, dt: Tensor, rate: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the same for one token of each sequence, without gradients: moves each state in and out once.

    On CUDA by mamba-ssm if it is installed; not run.
    """
    if is_fused(x, b):
        state = state.clone()  # changed in place
        of_head, of_state = (-1, -1, x.size(2)), (-1, x.size(2), state.size(3))
        parts = dt.unsqueeze(2).expand(of_head), rate[:, None, None].expand(of_state), b, c
        return library(STEP).selective_state_update(state, x, *parts, skip.unsqueeze(1).expand(-1, x.size(2))), state
    x32, times = x.to(state.dtype), x.size(1) // b.size(1)
    b, c = (part.to(state.dtype).repeat_interleave(times, 1) for part in (b, c))
    state = state * (dt * rate).exp()[..., None, None]
    state += (x32 * dt.unsqueeze(2)).unsqueeze(3) * b.unsqueeze(2)
    return (state @ c.unsqueeze(3)).squeeze(3).addcmul_(x32, skip.unsqueeze(1)).to(x.dtype), state


def is_fused(x: Tensor, b: Tensor) -> bool:
    """Whether mamba-ssm's kernels run for such heads."""
    width = b.size(-1)
    unless = f"states of {width} are wider than {MAX_STATE_DIM}" if width > MAX_STATE_DIM else ""
    return use_library("state_space", SCAN, x, unless=unless)


def _fused(
    x: Tensor,
    dt: Tensor,
    rate: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    lengths: Sequence[int],
    state: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute packed sequences in one call, those that continue a state in a call each: there are few of them."""
    scan = library(SCAN).mamba_chunk_scan_combined
    if state is not None:
        parts = zip(*(part.split(list(lengths)) for part in (x, dt, b, c)), state.unsqueeze(1), strict=True)
        results = []
        for *own, before in parts:
            x_, dt_, b_, c_ = (part.unsqueeze(0) for part in own)
            options = {"D": skip, "initial_states": before, "return_final_states": True}
            results.append(scan(x_, dt_, rate, b_, c_, FUSED_CHUNK, **options))
        return torch.cat([output.squeeze(0) for output, _ in results]), torch.cat([last for _, last in results])
    ids = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths)).to(x.device)
    x_, dt_, b_, c_ = (part.unsqueeze(0) for part in (x, dt, b, c))
    options = {"D": skip, "seq_idx": ids.unsqueeze(0)}
    if torch.is_grad_enabled():
        return scan(x_, dt_, rate, b_, c_, FUSED_CHUNK, **options).squeeze(0), None
    bounds = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32, device=x.device)
    options |= {"cu_seqlens": bounds, "return_varlen_states": True}
    output, last = scan(x_, dt_, rate, b_, c_, FUSED_CHUNK, **options)
    return output.squeeze(0), last


def _in_chunks(
    x: Tensor,
    dt: Tensor,
    rate: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    state: Tensor | None,
    chunks: Chunks,
) -> tuple[Tensor, Tensor]:
    """The recurrence in a few products of all chunks, between which `_Scan` passes the states on.

    Heads of a group are columns of its products. In a chunk let s_i be the sum of dt rate up to token i. Token i gets
    exp(s_i - s_j) (c_i b_j) dt_j x_j of token j, and exp(s_i) S c_i of the state S before the chunk.
    """
    groups, (heads, width), dtype = b.size(1), x.shape[1:], inside(x)
    each = heads // groups
    x32 = x.to(dtype)
    inputs = by_chunk((x32 * dt.unsqueeze(2)).reshape(len(x), groups, -1), chunks).unflatten(2, (each, width))
    keys, queries = (by_chunk(part.to(dtype), chunks) for part in (b, c))
    ratios, to_end, from_start = decays(by_chunk((dt * rate).unflatten(1, (groups, each)), chunks))
    attended = (queries @ keys.transpose(1, 2)).unsqueeze(1) * ratios
    outputs = (attended @ inputs.transpose(1, 2)).transpose(1, 2)
    ends = (inputs * to_end.unsqueeze(3)).flatten(2)
    if state is None:
        state = x.new_zeros(len(chunks.order), heads, width, b.size(2), dtype=dtype)
    starts, last = _Scan.apply(
        (ends.transpose(1, 2) @ keys).unflatten(1, (each, width)),
        from_start[:, -1, :, None, None],
        state.index_select(0, chunks.order).view(-1, each, width, b.size(2)),
        [count * groups for count in chunks.steps],
    )
    of_states = (queries @ starts.flatten(1, 2).transpose(1, 2)).unflatten(2, (each, width))
    outputs = outputs + of_states * from_start.unsqueeze(3)
    outputs = outputs.unflatten(0, (-1, groups)).transpose(1, 2).flatten(0, 1).index_select(0, chunks.slots)
    outputs = outputs.flatten(1, 2) + x32 * skip.unsqueeze(1)
    return outputs.to(x.dtype), last.view(-1, heads, width, b.size(2)).index_select(0, chunks.place)


class _Scan(torch.autograd.Function):
    """Compute S <- whole S + added of each chunk, step by step.

    added: (B, ...); whole: (B, ..., 1, 1), B chunks x groups, of which step n has the next `steps[n]`, those of the
    first states. Returns each chunk's S before it, and the last S.
    """

    @staticmethod
    def forward(ctx: Any, added: Tensor, whole: Tensor, state: Tensor, steps: list[int]) -> tuple[Tensor, Tensor]:
        starts, last = torch.empty_like(added), state.clone()
        for more, g, start in zip(*(each.split(steps) for each in (added, whole, starts)), strict=True):
            now = last[: len(more)]
            start.copy_(now)
            torch.addcmul(more, g, start, out=now)
        ctx.save_for_backward(whole, starts)
        ctx.steps = steps
        return starts, last

    @staticmethod
    def backward(ctx: Any, grad_starts: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
        """`after` is the gradient of S after a chunk."""
        whole, starts = ctx.saved_tensors
        after, grad = torch.empty_like(starts), grad_last.clone()
        by_step = list(zip(*(each.split(ctx.steps) for each in (whole, grad_starts, after)), strict=True))
        for g, from_outputs, later in reversed(by_step):
            now = grad[: len(g)]
            later.copy_(now)
            torch.addcmul(from_outputs, g, later, out=now)
        return after, (starts * after).sum((-2, -1), keepdim=True), grad, None
