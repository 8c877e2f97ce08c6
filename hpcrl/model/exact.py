"""Exact mode: the training model and the native engine compute a token's log-prob bitwise alike.

It needs fp32 on the CPU, one thread, and equal tensor parallelism on both sides. A token's result then depends on its
own sequence up to itself only: not on the number of other tokens, on the lengths of other sequences, or on whether it
comes in a prompt, one at a time, or in a packed micro-batch. Norms, rotary embeddings and other operations on single
tokens have this property; the matrix products, attention and sums over ranks in this file have it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear, pad

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


def exact_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x` (..., k) times `weight` (n, k) transposed: (..., n)."""
    return _product(x.reshape(-1, x.size(-1)), weight.t()).reshape(*x.shape[:-1], len(weight))


def exact_attention(queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Attention of queries to the keys at their own position and before.

    queries: (N, KV heads, L, queries per KV head, d) fp32. keys and values: (N, KV heads, any length, d) fp32, number i
    at position i, finite also where they are masked. positions: (N, L) or (1, L) int64. Returns the shape of the
    queries.
    """
    length, heads, width = queries.shape[2:]
    # (N, KV heads, blocks, rows, KEYS)
    scores = _product(queries.flatten(2, 3).unsqueeze(2), _blocks(keys).transpose(-1, -2)) * width**-0.5
    places = torch.arange(scores.size(2) * KEYS, device=keys.device).view(-1, 1, KEYS)
    masked = places > positions.repeat_interleave(heads, 1)[:, None, :, None]
    scores = scores.masked_fill(masked.unsqueeze(1), -torch.inf)
    weights = (scores - scores.detach().amax((2, 4), keepdim=True)).exp()
    output = _in_order(_product(weights, _blocks(values)).unbind(2)) / _in_order(
        weights.sum(-1, keepdim=True).unbind(2)
    )
    return output.unflatten(2, (length, heads))


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
    """Raise InputError if exact mode is not possible: another dtype, device or number of threads, or matrix products
    whose rows depend on their number."""
    if dtype is not torch.float32 or device.type != "cpu":
        raise InputError(
            f"rollout.exact=true with {dtype} on {device.type}; it needs float32 on the CPU: set model.dtype and "
            "rollout.dtype to float32, or rollout.exact to false"
        )
    if block := unsupported(shape.layers, "exact"):
        raise InputError(f"rollout.exact=true with {block} is not supported; set rollout.exact to false")
    if torch.get_num_threads() != 1:
        raise InputError(
            f"rollout.exact=true with {torch.get_num_threads()} threads per rank; set OMP_NUM_THREADS=1, or "
            "rollout.exact to false"
        )
    split = shape.ffn_hidden_size // tp_size, shape.num_attention_heads * shape.head_dim // tp_size
    for width in sorted({shape.hidden_size, *split}):
        x, weight = _probe(ROWS * 19, width), _probe(ROWS * 3, width)
        whole = linear(x, weight)
        for rows in (1, ROWS, ROWS * 4):
            if not torch.equal(exact_linear(x[3 : 3 + rows], weight), whole[3 : 3 + rows]):
                raise InputError(
                    _no_exact(f"a matrix product over {width} columns is not bitwise the same with {rows} rows")
                )
    heads, tokens = shape.num_attention_heads // shape.num_query_groups, 2 * KEYS
    queries = _probe(1, 1, tokens, heads, shape.head_dim)
    keys, values = _probe(2, 1, 1, tokens, shape.head_dim)
    place = torch.arange(tokens).unsqueeze(0)
    whole = exact_attention(queries, keys, values, place)
    for at in range(3, tokens, 11):
        one = exact_attention(queries[:, :, [at]], keys[:, :, : at + 6], values[:, :, : at + 6], place[:, [at]])
        if not torch.equal(one, whole[:, :, [at]]):
            raise InputError(
                _no_exact(f"attention with head_dim={shape.head_dim} is not bitwise the same for a single query")
            )


def _no_exact(found: str) -> str:
    return f"rollout.exact=true, but with this machine's torch {found}; set rollout.exact to false"


def _probe(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


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
