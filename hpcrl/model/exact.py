"""Exact mode: the training model and the native engine compute a token's log-prob bitwise alike.

It needs equal dtypes and equal tensor parallelism on both sides, and one thread on a CPU. A token's result then depends
on its own sequence up to itself only: not on the number of other tokens, on the lengths of other sequences, or on
whether it comes in a prompt, one at a time, or in a packed micro-batch. Norms, rotary embeddings and other operations
on single tokens have this property; the matrix products, attention and sums over ranks in this file have it too.

`TensorParallel` is a group of ranks as decoding and sampling use it, whose sums are exact or not.

Without kernels, products and attention of bf16 are computed in fp32 and rounded. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
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
MAX_WIDTH = 256  # of a head in the kernel, which holds tiles of them in registers
PAGE = 32  # tokens of a block, as in the engine, so that both sides run one kernel


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
        if use_triton("exact_product", x):
            from hpcrl.kernels.exact_triton import exact_product

            return exact_product(x, weight, dtype)
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

    Returns the shape and dtype of the queries.

    Args:
        queries: (N, KV heads, L, queries per KV head, d).
        keys, values: (N, KV heads, any length, d), number i at position i, finite also where they are masked.
        positions: (N, L) or (1, L) int64.
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


class Tiles(NamedTuple):
    """Queries of tokens whose sequences are in blocks of PAGE keys and values.

    numbers: int32 (m, 4), of each tile, which has at most `tokens` consecutive tokens of one sequence: the row of its
    first token, how many it has, the first one's position, and the place in `blocks` of the sequence's first block.
    blocks: int32, at most `width` of a sequence.
    """

    numbers: Tensor
    tokens: int
    blocks: Tensor
    width: int

    @classmethod
    def of(cls, lengths: np.ndarray, cached: np.ndarray, table: np.ndarray, tokens: int, device: torch.device) -> Tiles:
        """`lengths` new tokens of each sequence, after `cached` ones, int64 (N,), with blocks `table` (N, width)."""
        counts = -(-lengths // tokens)
        sequence = np.arange(len(lengths)).repeat(counts)
        offset = (np.arange(counts.sum()) - (counts.cumsum() - counts)[sequence]) * tokens
        first, sizes = (lengths.cumsum() - lengths)[sequence], np.minimum(tokens, lengths[sequence] - offset)
        width = table.shape[1]
        numbers = np.stack([first + offset, sizes, cached[sequence] + offset, sequence * width], 1)
        on_device = [torch.from_numpy(part.astype(np.int32)).to(device) for part in (numbers, table.ravel())]
        return cls(on_device[0], tokens, on_device[1], width)


def tile_tokens(per_head: int, dtype: torch.dtype) -> int:
    """Return the tokens of a tile with `per_head` queries each, independent of the number of tokens."""
    return max(1, (16 if dtype is torch.float32 else 64) // per_head)


def has_attention_kernel(queries: Tensor) -> bool:
    width = queries.size(-1)
    unless = f"heads of {width} are wider than {MAX_WIDTH}" if width > MAX_WIDTH else ""
    return use_triton("exact_attention", queries, unless=unless)


def paged_attention(queries: Tensor, keys: Tensor, values: Tensor, tiles: Tiles) -> Tensor:
    """`exact_attention` of queries (n, KV heads, queries per KV head, d) to keys (blocks, KV heads, d, PAGE) and values
    (blocks, KV heads, PAGE, d): the shape of the queries. No gradient."""
    if has_attention_kernel(queries):
        from hpcrl.kernels.exact_triton import attention

        return attention(queries, keys, values, tiles.blocks, tiles.numbers, tiles.tokens)
    first, sizes, position, start = tiles.numbers.long().unsqueeze(-1).unbind(1)
    place = torch.arange(tiles.tokens, device=queries.device)
    rows = torch.where(place < sizes, first + place, len(queries))
    padded = pad(queries, (0, 0, 0, 0, 0, 0, 0, 1))[rows].transpose(1, 2)
    blocks = start + torch.arange(tiles.width, device=queries.device)
    table = tiles.blocks[blocks.clamp(max=len(tiles.blocks) - 1)]
    cached = keys[table].permute(0, 2, 1, 4, 3).flatten(2, 3), values[table].transpose(1, 2).flatten(2, 3)
    attended = exact_attention(padded, *cached, position + place).transpose(1, 2)
    output = queries.new_empty(len(queries) + 1, *queries.shape[1:])
    return output.index_copy_(0, rows.flatten(), attended.flatten(0, 1))[:-1]


def packed_attention(queries: Tensor, keys: Tensor, values: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Return `paged_attention` of packed sequences: queries (T, heads, d), keys and values (T, KV heads, d) to (T,
    heads, d). They are copied to blocks, so that training runs the kernel of decoding."""
    grouped = queries.unflatten(1, (keys.size(1), -1))
    tiles, block, offset = _packed_tiles(lengths, tile_tokens(grouped.size(2), queries.dtype), queries.device)
    size = sum(-(-length // PAGE) for length in lengths), keys.size(1)
    paged_keys, paged_values = keys.new_empty(*size, keys.size(-1), PAGE), keys.new_empty(*size, PAGE, keys.size(-1))
    paged_keys.permute(0, 3, 1, 2)[block, offset] = keys
    paged_values.transpose(1, 2)[block, offset] = values
    return paged_attention(grouped, paged_keys, paged_values, tiles).flatten(1, 2)


@lru_cache(maxsize=8)  # all layers of a pass have one
def _packed_tiles(lengths: tuple[int, ...], tokens: int, device: torch.device) -> tuple[Tiles, Tensor, Tensor]:
    """Return tiles, and each token's block and place in it, int64 (T,)."""
    sizes = np.array(lengths)
    counts = -(-sizes // PAGE)
    first = counts.cumsum() - counts
    table = np.minimum(first[:, None] + np.arange(counts.max()), counts.sum() - 1)
    position = np.arange(sizes.sum()) - (sizes.cumsum() - sizes).repeat(sizes)
    places = first.repeat(sizes) + position // PAGE, position % PAGE
    with torch.inference_mode(False):
        block, offset = (torch.from_numpy(part).to(device) for part in places)
        return Tiles.of(sizes, np.zeros_like(sizes), table, tokens, device), block, offset


def with_gradient_of(plain: Tensor, exact: Tensor) -> Tensor:
    """Return the numbers of `exact`, whose gradient is that of `plain`, which differs from it by rounding."""
    found: Tensor = _WithGradient.apply(plain, exact)
    return found


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plain: Tensor, exact: Tensor) -> Tensor:
        return exact.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def exact_log_probs(logits: Tensor, targets: Tensor, vocab_size: int, temperature: float) -> Tensor:
    """Return `exact_log_softmax` at `targets` (n, k) int64, without a gradient. Its sums over the vocabulary have one
    order, which those of libraries on GPUs do not have."""
    if not use_triton("exact_log_probs", logits):
        return exact_log_softmax(logits, vocab_size, temperature).gather(1, targets)
    from hpcrl.kernels.linear_log_prob_triton import row_sums

    top, total = row_sums(logits.detach(), vocab_size, temperature or 1.0)
    return (logits.detach().gather(1, targets).float() - top) / (temperature or 1.0) - total.log()


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


@dataclass(frozen=True)
class TensorParallel:
    """A tensor-parallel group; with one rank every call is the identity. `exact` sums in rank order."""

    group: dist.ProcessGroup | None
    rank: int
    size: int
    exact: bool = False

    def __post_init__(self) -> None:
        if self.size > 1 and self.group is None:
            raise ValueError(f"tensor parallelism over {self.size} ranks needs a process group")

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum over ranks; `partial` may be overwritten."""
        if self.exact:
            return exact_sum(partial, self.group)
        if self.size > 1:
            dist.all_reduce(partial, group=self.group)
        return partial

    def gather_columns(self, part: Tensor) -> Tensor:
        """(n, m) on each rank -> (n, size * m) on all, in rank order."""
        if self.size == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part, group=self.group)
        return torch.cat(parts, dim=1)

    def smallest(self, number: int) -> int:
        """Return the minimum over ranks. Collective."""
        if self.size == 1:
            return number
        least = torch.tensor(number)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        return int(least)


def check_exact(shape: ModelShape, tp_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise InputError if exact mode is not possible: another number of threads, or products, attention or norms whose
    results for a token depend on the number of tokens."""
    if block := unsupported(shape.layers, "exact"):
        raise InputError(f"rollout.exact=true with {block} is not supported; set rollout.exact to false")
    if shape.routed is not None and tp_size > 1:
        raise InputError(f"rollout.exact=true with experts and tp={tp_size} is not supported; set tp to 1")
    if device.type == "cpu" and torch.get_num_threads() != 1:
        raise InputError(
            f"rollout.exact=true with {torch.get_num_threads()} threads per rank; set OMP_NUM_THREADS=1, or "
            "rollout.exact to false"
        )
    split = shape.ffn_hidden_size // tp_size, shape.num_attention_heads * shape.head_dim // tp_size
    probe = partial(_probe, dtype=dtype, device=device)
    of_experts = {layer.mlp.inner_width // layer.mlp.choices for layer in shape.layers if layer.num_experts}
    for width in sorted({shape.hidden_size, *split, *of_experts}):
        x, weight = probe(ROWS * 19, width), probe(ROWS * 3, width)
        _check_rows(f"a matrix product over {width} columns", partial(exact_linear, weight=weight), x)
    norm, logits = probe(shape.hidden_size), probe(ROWS * 5, shape.softmax_size).float()
    _check_rows("RMSNorm", lambda x: rms_norm(x, norm, shape.rms_norm_eps), probe(ROWS * 5, shape.hidden_size))
    first = torch.zeros(len(logits), 1, dtype=torch.int64, device=device)
    _check_rows(
        "a softmax over the vocabulary",
        lambda x: exact_log_probs(x, first[: len(x)], shape.softmax_size, 1.0),
        logits,
    )
    heads = shape.num_attention_heads // shape.num_query_groups
    is_exact = _is_paged_exact if has_attention_kernel(probe(1, shape.head_dim)) else _is_exact
    if not is_exact(heads, shape.head_dim, probe):
        raise InputError(
            _no_exact(f"attention with head_dim={shape.head_dim} is not bitwise the same for a single query")
        )


def _is_exact(heads: int, width: int, probe: Callable[..., Tensor]) -> bool:
    queries, (keys, values) = probe(1, 1, 2 * KEYS, heads, width), probe(2, 1, 1, 2 * KEYS, width)
    place = torch.arange(2 * KEYS, device=keys.device).unsqueeze(0)
    whole = exact_attention(queries, keys, values, place)
    return all(
        torch.equal(
            exact_attention(queries[:, :, [at]], keys[:, :, : at + 6], values[:, :, : at + 6], place[:, [at]]),
            whole[:, :, [at]],
        )
        for at in range(3, 2 * KEYS, 11)
    )


def _is_paged_exact(heads: int, width: int, probe: Callable[..., Tensor]) -> bool:
    """Whether tiles of many tokens and of one token agree, for two KV heads and sequences."""
    lengths = np.array([2 * KEYS, KEYS + 3])
    table, tokens = np.arange(8)[::-1].reshape(2, -1), int(lengths.sum())
    queries, keys, values = probe(tokens, 2, heads, width), probe(8, 2, width, PAGE), probe(8, 2, PAGE, width)
    many = Tiles.of(lengths, np.zeros_like(lengths), table, tile_tokens(heads, keys.dtype), keys.device)
    sequence = np.arange(2).repeat(lengths)
    position = np.arange(tokens) - lengths[0] * sequence
    sample = np.arange(3, tokens, 11)
    single = Tiles.of(np.ones_like(sample), position[sample], table[sequence[sample]], many.tokens, keys.device)
    whole = paged_attention(queries, keys, values, many)
    chosen = torch.from_numpy(sample).to(keys.device)
    return torch.equal(paged_attention(queries[chosen], keys, values, single), whole[chosen])


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
