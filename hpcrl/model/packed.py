"""A micro-batch as one packed sequence of tokens: index tensors, context-parallel parts, padded arrays of like lengths.

The packed tokens are cut into 2 cp chunks, of which rank r has the r-th from either end: under causal attention the
ranks then have about equally much to do (Llama 3 report, arXiv:2407.21783, section 3.3.2). Keys and values are
gathered, queries stay. Functions of integers alone; every rank computes them for itself.

One array for all would be as wide as the longest run; runs of less than half of that go to an array of their own, so
that no array is more than half padding. Functions of integers alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from hpcrl.model.rope import rope_cos_sin

if TYPE_CHECKING:
    from hpcrl.model.router import Routing
    from hpcrl.model.shape import ModelShape


@dataclass(frozen=True)
class Tail:
    """A chunk's tokens of a sequence that began in an earlier chunk: `queries` of them, which look at the `keys`, int64
    (K,) places among the gathered tokens, from the sequence's first one to the last query."""

    queries: int
    keys: Tensor


def tokens_of(size: int, rank: int, cp: int) -> Tensor:
    """int64 (size / cp,): the packed tokens that `rank` has, in its order; 2 cp divides `size`."""
    chunk = size // (2 * cp)
    first, second = rank * chunk, (2 * cp - 1 - rank) * chunk
    return torch.cat([torch.arange(first, first + chunk), torch.arange(second, second + chunk)])


def places(size: int, cp: int) -> Tensor:
    """int64 (size,): where each packed token is once the ranks' tokens are gathered in rank order."""
    order = torch.cat([tokens_of(size, rank, cp) for rank in range(cp)])
    found = torch.empty_like(order)
    found[order] = torch.arange(size)
    return found


def runs_of(lengths: Tensor, size: int, rank: int, cp: int) -> tuple[Places, tuple[Tail, ...]]:
    """Where the attention of a rank has its tokens. `lengths` int64 (sequences,) are those of the packed sequences,
    which `size` tokens hold, with padding behind them.

    In the buckets, by local token: what lies in one chunk of a sequence that begins there, and so looks at tokens of
    this rank alone. Behind them the queries of the tails, of which there are two at most, at the beginning of a chunk.
    """
    chunk = size // (2 * cp)
    begun: list[tuple[int, int]] = []  # first local token, tokens
    alone, tails = [], []
    gathered = places(size, cp)
    ends = lengths.cumsum(0).tolist()
    for number, place in enumerate((rank, 2 * cp - 1 - rank)):
        low, high = place * chunk, (place + 1) * chunk
        for end, length in zip(ends, lengths.tolist(), strict=True):
            start, first, behind = end - length, max(low, end - length), min(high, end)
            local = number * chunk + first - low
            if first < behind and first == start:
                begun.append((local, behind - first))
            elif first < behind:
                alone.append(torch.arange(local, local + behind - first))
                tails.append(Tail(behind - first, gathered[start:behind]))
    firsts, counts = torch.tensor(begun, dtype=torch.int64).view(-1, 2).unbind(1)
    return places_of(firsts, counts, torch.cat([*alone, firsts[:0]])), tuple(tails)


class Bucket(NamedTuple):
    """`rows` runs, padded at the end to `width` tokens each."""

    rows: int
    width: int

    @property
    def size(self) -> int:
        return self.rows * self.width


class Places(NamedTuple):
    """Of T tokens in the buckets, one bucket after the other, and behind them one place each for `alone` tokens.

    Both int64: slots (T,) the place of token t; sources (places,) the token at a place, any one where it is padding.
    """

    buckets: tuple[Bucket, ...]
    slots: Tensor
    sources: Tensor


def places_of(firsts: Tensor, lengths: Tensor, alone: Tensor | None = None) -> Places:
    """Runs begin at tokens `firsts` int64 (N,) and have `lengths` (N,), at least 1 each; with `alone` int64 they hold
    each of the tokens 0 to T - 1 once."""
    order = lengths.argsort(descending=True, stable=True)
    sizes = lengths[order].tolist()
    buckets: list[Bucket] = []
    for length in sizes:
        if buckets and 2 * length >= buckets[-1].width:
            buckets[-1] = Bucket(buckets[-1].rows + 1, buckets[-1].width)
        else:
            buckets.append(Bucket(1, length))
    sources, taken = [], []
    runs = torch.stack([firsts[order], lengths[order]], 1).split([bucket.rows for bucket in buckets])
    for bucket, members in zip(buckets, runs, strict=True):
        offsets = torch.arange(bucket.width)
        is_token = offsets < members[:, 1:]
        sources.append(torch.where(is_token, members[:, :1] + offsets, 0).flatten())
        taken.append(is_token.flatten())
    if alone is not None:
        sources.append(alone)
        taken.append(torch.ones(len(alone), dtype=torch.bool))
    source, is_taken = (torch.cat(parts) for parts in (sources, taken))
    slots = torch.empty(int(is_taken.sum()), dtype=torch.int64)
    slots[source[is_taken]] = is_taken.nonzero().squeeze(1)
    return Places(tuple(buckets), slots, source)


@dataclass
class PackedTokens(PackedSeqParams):
    """N sequences of T tokens in all, one after the other, padded at the end to S tokens.

    Megatron hands it, as its `packed_seq_params`, to every attention layer and to the head. Padding tokens belong to no
    sequence: their attention output is 0 and nothing reads their logits. With context parallelism all of it is this
    rank's share, with the runs of `hpcrl.model.packed` in the place of sequences.

    Of megatron's own fields it has cu_seqlens_q int32 (N + 1,), from 0 to T, and max_seqlen_q, the longest sequence;
    None with context parallelism.
    """

    # The class it extends has defaults, so these need them too; `pack` sets all.
    input_ids: Tensor = None  # type: ignore[assignment]  # (1, S) int64
    position_ids: Tensor = None  # type: ignore[assignment]  # (1, S) int64
    cos: Tensor = None  # type: ignore[assignment]  # (S, rope_dim / 2) fp32
    sin: Tensor = None  # type: ignore[assignment]  # (S, rope_dim / 2) fp32
    buckets: tuple[Bucket, ...] = ()  # padded arrays in which attention has its tokens
    slots: Tensor = None  # type: ignore[assignment]  # (T,) int64: place of token t in them
    sources: Tensor = None  # type: ignore[assignment]  # (places,) int64: token at that place; any one where it is padding
    output_rows: Tensor | None = None  # (R,) int64: tokens whose head output is wanted; None: all S
    tails: tuple[Tail, ...] | None = None  # with context parallelism: see hpcrl.model.packed
    routing: Routing | None = None  # of a model with experts

    @property
    def num_tokens(self) -> int:
        """T, without padding."""
        return self.slots.numel()

    def to(self, device: torch.device) -> PackedTokens:
        if self.slots.device == device:
            return self
        tensors: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        tails = self.tails and tuple(Tail(tail.queries, tail.keys.to(device)) for tail in self.tails)
        routing = self.routing and self.routing.to(device)
        return replace(self, **tensors, tails=tails, routing=routing)


def pack(
    input_ids: Tensor,
    lengths: Tensor,
    shape: ModelShape,
    *,
    size: int,
    output_rows: Tensor | None = None,
    device: torch.device | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
) -> PackedTokens:
    """Pack sequences for one forward pass.

    `input_ids` (T,) holds the sequences one after the other, `lengths` (N,) int64 their lengths (at least 1 each),
    `size` is the S of all ranks, at least T. `output_rows` are this rank's own. Index tensors are made once here and
    used by every layer. All are on the CPU, for `PackedTokens.to`, but those of the rotary embedding, which are the
    largest: they are computed on `device`.
    """
    total = input_ids.numel()
    starts = lengths.cumsum(0) - lengths
    sequence = torch.repeat_interleave(lengths, output_size=total)
    position = torch.arange(total) - starts[sequence]
    padded_ids = torch.zeros(size, dtype=torch.int64)
    padded_ids[:total] = input_ids
    position_ids = torch.zeros(size, dtype=torch.int64)
    position_ids[:total] = position
    if cp_size > 1:
        mine = tokens_of(size, cp_rank, cp_size)
        padded_ids, position_ids = padded_ids[mine], position_ids[mine]
        places, tails = runs_of(lengths, size, cp_rank, cp_size)
        bounds = None
    else:
        places, tails = places_of(starts, lengths), None
        bounds = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    position_ids = position_ids.to(device)
    cos, sin = rope_cos_sin(position_ids, shape.rope_dim, shape.rope_theta, shape.rope_scaling)
    return PackedTokens(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        max_seqlen_q=None if bounds is None else int(lengths.max()),
        input_ids=padded_ids.unsqueeze(0),
        position_ids=position_ids.unsqueeze(0),
        cos=cos,
        sin=sin,
        output_rows=output_rows,
        tails=tails,
        **places._asdict(),
    )
