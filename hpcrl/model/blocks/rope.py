"""What a rotary position embedding is. No torch; angles are in `rope_angles`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class RopeScaling:
    """How a rotary embedding is extended beyond the sequence length of the first training; names are those of
    config.json, formulas are in `hpcrl.model.blocks.rope_angles`."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position_embeddings: int = 0  # of "llama3" and "yarn"
    low_freq_factor: float = 1.0  # of "llama3"
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # of "yarn"
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # of the embedding
    mscale_all_dim: float = 0.0  # of DeepSeek's "yarn": sharpens the softmax, see ModelShape.softmax_scale
    truncate: bool = field(default=True, repr=False)  # of "yarn": whether the bounds of its ramp are whole dimensions


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of a layer's queries and keys: of the first `dim` numbers of a head, with the base `theta`.

    With `axes` a token of a picture has several positions, and frequency i turns with that of axis `axes[i]`.
    """

    dim: int
    theta: float
    scaling: RopeScaling | None = None
    axes: tuple[int, ...] | None = None
