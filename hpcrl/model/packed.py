"""A micro-batch as one packed sequence of tokens, with the index tensors that every layer uses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from hpcrl.model.buckets import Bucket, places_of
from hpcrl.model.context_parallel import Tail, runs_of, tokens_of
from hpcrl.model.rope import rope_cos_sin

if TYPE_CHECKING:
    from hpcrl.model.router import Routing
    from hpcrl.model.shape import ModelShape


@dataclass
class PackedTokens(PackedSeqParams):
    """N sequences of T tokens in all, one after the other, padded at the end to S tokens.

    Megatron hands it, as its `packed_seq_params`, to every attention layer and to the head. Padding tokens belong to no
    sequence: their attention output is 0 and nothing reads their logits. With context parallelism all of it is this
    rank's share, with the runs of `hpcrl.model.context_parallel` in the place of sequences.

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
    tails: tuple[Tail, ...] | None = None  # with context parallelism: see hpcrl.model.context_parallel
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
