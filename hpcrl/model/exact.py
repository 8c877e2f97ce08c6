"""Exact mode: the training model and the native engine compute a token's log-prob bitwise alike.

It needs equal dtypes and equal tensor parallelism on both sides, and one thread on a CPU. A token's result then depends
on its own sequence up to itself only: not on the number of other tokens, on the lengths of other sequences, or on
whether it comes in a prompt, one at a time, or in a packed micro-batch. Norms, rotary embeddings and other operations
on single tokens have this property; the matrix products, attention and sums over ranks in this file have it too.

Without kernels, products and attention of bf16 are computed in fp32 and rounded. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from hpcrl.kernels.dispatch import use_triton
from hpcrl.kernels.fp32_product import add_product, added, sums_in_fp32
from hpcrl.kernels.layers import rms_norm
from hpcrl.model.blocks.block import unsupported
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from hpcrl.model.shape import ModelShape

# A matrix product with at least 16 rows and 16 columns computes a row bitwise alike for any place and number of rows
# (observed with oneDNN on AMD's AVX-512, and with MKL on Intel's and AMD's, sums of 3 to 8192 terms; below 16 rows MKL
# splits sums differently, and on AMD the result depends on a row's place below 12 columns). `check_exact` tests it.
ROWS, COLUMNS = 16, 16
# Keys per block: a sum over keys is taken inside each block and then over the blocks in order, so that blocks without
# visible keys add zeros at the end.
KEYS = 64


def exact_linear(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return `x` (..., k) times `weight` (n, k) transposed: (..., n), in `dtype`, that of `x` unless given."""
    rows = x.reshape(-1, x.size(-1))
    if x.dtype == torch.float32 and not use_triton("exact_product", x):
        product = _product(rows, weight.t())
    else:
        product = _Linear.apply(rows, weight, dtype or x.dtype)
    return product.reshape(*x.shape[:-1], len(weight))


class _Linear(torch.autograd.Function):
    """The backward pass is the library's: only log-probs have to be equal bit for bit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x.float(), weight.t().float()).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad, grad_weight = grad.to(weight.dtype), None
        if ctx.needs_input_grad[1] and sums_in_fp32(weight):
            add_product(weight.main_grad, grad.t(), x)
            grad_weight = added(weight)
        elif ctx.needs_input_grad[1]:
            grad_weight = grad.t() @ x
        return grad @ weight if ctx.needs_input_grad[0] else None, grad_weight, None


def exact_attention(queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Attention of queries to the keys at their own position and before.

    queries: (N, KV heads, L, queries per KV head, d). keys and values: (N, KV heads, any length, d), number i at
    position i, finite also where they are masked. positions: (N, L) or (1, L) int64. Returns the shape and dtype of the
    queries.
    """
    (length, heads, width), dtype = queries.shape[2:], queries.dtype
    queries, keys, values = queries.float(), keys.float(), values.float()
    # (N, KV heads, blocks, rows, KEYS)
    scores = _product(queries.flatten(2, 3).unsqueeze(2), _blocks(keys).transpose(-1, -2)) * width**-0.5
    places = torch.arange(scores.size(2) * KEYS, device=keys.device).view(-1, 1, KEYS)
    masked = places > positions.repeat_interleave(heads, 1)[:, None, :, None]
    scores = scores.masked_fill(masked.unsqueeze(1), -torch.inf)
    weights = (scores - scores.detach().amax((2, 4), keepdim=True)).exp()
    output = _in_order(_product(weights, _blocks(values)).unbind(2)) / _in_order(
        weights.sum(-1, keepdim=True).unbind(2)
    )
    return output.unflatten(2, (length, heads)).to(dtype)


def exact_log_softmax(logits: Tensor, vocab_size: int, temperature: float) -> Tensor:
    """Return log-probs (n, vocab_size) fp32 of whole logits (n, padded vocabulary); temperature 0 means 1."""
    return (logits[:, :vocab_size].float() / (temperature or 1.0)).log_softmax(-1)


def exact_sum(partial: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum over the ranks of `group`, added in rank order; a new tensor unless there is one rank.

    An all-reduce adds in an order that depends on the length of the message.
    """
    if group is None or group.size() == 1:
        return partial
    parts = partial.new_empty(group.size(), *partial.shape)
    dist.all_gather_into_tensor(parts, partial.contiguous(), group=group)
    return _in_order(parts.unbind(0))


def check_exact(shape: ModelShape, tp_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise InputError if exact mode is not possible: another number of threads, or products, attention or norms whose
    results for a token depend on the number of tokens."""
    if block := unsupported(shape.layers, "exact"):
        raise InputError(f"rollout.exact=true with {block} is not supported; set rollout.exact to false")
    if device.type == "cpu" and torch.get_num_threads() != 1:
        raise InputError(
            f"rollout.exact=true with {torch.get_num_threads()} threads per rank; set OMP_NUM_THREADS=1, or "
            "rollout.exact to false"
        )
    split = shape.ffn_hidden_size // tp_size, shape.num_attention_heads * shape.head_dim // tp_size
    probe = partial(_probe, dtype=dtype, device=device)
    for width in sorted({shape.hidden_size, *split}):
        x, weight = probe(ROWS * 19, width), probe(ROWS * 3, width)
        _check_rows(f"a matrix product over {width} columns", partial(exact_linear, weight=weight), x)
    norm, logits = probe(shape.hidden_size), probe(ROWS * 19, shape.softmax_size).float()
    _check_rows("RMSNorm", lambda x: rms_norm(x, norm, shape.rms_norm_eps), probe(ROWS * 19, shape.hidden_size))
    _check_rows("a softmax over the vocabulary", lambda x: exact_log_softmax(x, shape.softmax_size, 1.0), logits)
    heads, tokens = shape.num_attention_heads // shape.num_query_groups, 2 * KEYS
    queries = probe(1, 1, tokens, heads, shape.head_dim)
    keys, values = probe(2, 1, 1, tokens, shape.head_dim)
    place = torch.arange(tokens, device=device).unsqueeze(0)
    whole = exact_attention(queries, keys, values, place)
    for at in range(3, tokens, 11):
        one = exact_attention(queries[:, :, [at]], keys[:, :, : at + 6], values[:, :, : at + 6], place[:, [at]])
        if not torch.equal(one, whole[:, :, [at]]):
            raise InputError(
                _no_exact(f"attention with head_dim={shape.head_dim} is not bitwise the same for a single query")
            )


def _check_rows(what: str, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    whole = function(x)
    for rows in (1, ROWS, ROWS * 4):
        if not torch.equal(function(x[3 : 3 + rows]), whole[3 : 3 + rows]):
            raise InputError(_no_exact(f"{what} is not bitwise the same with {rows} rows"))


def _no_exact(found: str) -> str:
    return f"rollout.exact=true, but with this machine's torch {found}; set rollout.exact to false"


def _probe(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def _blocks(x: Tensor) -> Tensor:
    """(N, KV heads, length, d) -> (N, KV heads, blocks, KEYS, d), zeros at the end."""
    return pad(x, (0, 0, 0, -x.size(2) % KEYS)).unflatten(2, (-1, KEYS))


def _product(x: Tensor, y: Tensor) -> Tensor:
    """(..., rows, k) times (..., k, n), padded to at least `ROWS` and `COLUMNS`."""
    rows, columns = x.size(-2), y.size(-1)
    if columns < COLUMNS:
        y = pad(y, (0, COLUMNS - columns))
    return (pad(x, (0, 0, 0, -rows % ROWS)) @ y)[..., :rows, :columns]


def _in_order(parts: tuple[Tensor, ...]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
