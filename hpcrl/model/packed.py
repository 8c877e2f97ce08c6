"""A micro-batch as one packed sequence of tokens, with the index tensors that every layer uses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from hpcrl.model.rope import rope_cos_sin

if TYPE_CHECKING:
    from hpcrl.model.shape import ModelShape


@dataclass
class PackedTokens(PackedSeqParams):
    """N sequences of T tokens in all, one after the other, padded at the end to S tokens.

    Megatron hands it, as its `packed_seq_params`, to every attention layer and to the head. Padding tokens belong to no
    sequence: their attention output is 0 and nothing reads their logits.
    """

    # The class it extends has defaults, so these need them too; `pack` sets all.
    input_ids: Tensor = None  # type: ignore[assignment]  # (1, S) int64
    position_ids: Tensor = None  # type: ignore[assignment]  # (1, S) int64
    cos: Tensor = None  # type: ignore[assignment]  # (S, head_dim / 2) fp32
    sin: Tensor = None  # type: ignore[assignment]  # (S, head_dim / 2) fp32
    num_sequences: int = 0  # N
    longest: int = 0  # L, tokens of the longest sequence
    slots: Tensor = None  # type: ignore[assignment]  # (T,) int64: place of token t in a padded (N * L) array
    sources: Tensor = None  # type: ignore[assignment]  # (N * L,) int64: token at that place; any token where the place is padding
    output_rows: Tensor | None = None  # (R,) int64: tokens whose head output is wanted; None: all S

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
        return replace(self, **tensors)


def pack(
    input_ids: Tensor, lengths: Tensor, shape: ModelShape, *, size: int, output_rows: Tensor | None = None
) -> PackedTokens:
    """Pack sequences for one forward pass.

    `input_ids` (T,) holds the sequences one after the other, `lengths` (N,) int64 their lengths (at least 1 each),
    `size` is S >= T. Index tensors are made once here and used by every layer.
    """
    total = input_ids.numel()
    longest = int(lengths.max())
    starts = lengths.cumsum(0) - lengths
    sequence = torch.repeat_interleave(lengths, output_size=total)
    position = torch.arange(total) - starts[sequence]
    slots = sequence * longest + position
    sources = torch.zeros(len(lengths) * longest, dtype=torch.int64)
    sources[slots] = torch.arange(total)

    padded_ids = torch.zeros(size, dtype=torch.int64)
    padded_ids[:total] = input_ids
    position_ids = torch.zeros(size, dtype=torch.int64)
    position_ids[:total] = position
    cos, sin = rope_cos_sin(position_ids, shape.head_dim, shape.rope_theta)
    return PackedTokens(
        qkv_format="thd",
        input_ids=padded_ids.unsqueeze(0),
        position_ids=position_ids.unsqueeze(0),
        cos=cos,
        sin=sin,
        num_sequences=len(lengths),
        longest=longest,
        slots=slots,
        sources=sources,
        output_rows=output_rows,
    )
