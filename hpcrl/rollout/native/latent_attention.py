"""Latent attention over a cache of latents (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).

A head's key is a product of the token's latent, so that the query can take that product instead: all heads then look
at the latents themselves, and what they bring back becomes the heads' values afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hpcrl.kernels.layers import rms_norm
from hpcrl.model.layers import LATENT_NORM_EPS
from hpcrl.model.rope import deinterleave
from hpcrl.model.shape import LatentAttention, ModelShape

Linear = Callable[[Tensor, Tensor], Tensor]


class LatentWeights(NamedTuple):
    """Of a layer; the first two are not in a model whose queries come from the hidden state itself."""

    q_down: Tensor | None
    q_norm: Tensor | None
    q_up: Tensor
    kv_down: Tensor
    kv_norm: Tensor
    kv_up: Tensor

    @classmethod
    def of_layer(cls, mla: LatentAttention, weight: Callable[[str], Tensor]) -> LatentWeights:
        def of(name: str) -> Tensor:
            return weight(f"self_attention.{name}.weight")

        latents = of("linear_kv_down_proj"), of("kv_layernorm"), of("linear_kv_up_proj")
        if mla.q_lora_rank is None:
            return cls(None, None, of("linear_q_proj"), *latents)
        return cls(of("linear_q_down_proj"), of("q_layernorm"), of("linear_q_up_proj"), *latents)


def queries_and_keys(
    x: Tensor, weights: LatentWeights, shape: ModelShape, linear: Linear, rotate: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """`x` (n, hidden) -> queries (n, 1, heads, kv_lora_rank + rope_dim) of this rank's heads, for an attention that
    divides by the square root of that width, and keys (n, 1, kv_lora_rank + rope_dim)."""
    mla = shape.mla
    assert mla is not None
    if weights.q_down is None or weights.q_norm is None:
        queries = linear(x, weights.q_up)
    else:
        queries = linear(rms_norm(linear(x, weights.q_down), weights.q_norm, LATENT_NORM_EPS), weights.q_up)
    queries, rotary_queries = queries.unflatten(-1, (1, -1, shape.head_dim)).split(
        [mla.qk_nope_head_dim, mla.qk_rope_head_dim], -1
    )
    latent, rotary_key = linear(x, weights.kv_down).split([mla.kv_lora_rank, mla.qk_rope_head_dim], -1)
    latent = rms_norm(latent, weights.kv_norm, LATENT_NORM_EPS)
    rotated = rotate(deinterleave(torch.cat((rotary_queries, rotary_key[:, None, None]), dim=2)))
    to_key = _by_head(weights.kv_up, mla)[:, : mla.qk_nope_head_dim]
    queries = torch.cat((torch.einsum("nghd,hdl->nghl", queries, to_key), rotated[:, :, :-1]), -1)
    keys = torch.cat((latent[:, None], rotated[:, :, -1]), -1)
    return queries * (shape.softmax_scale * math.sqrt(keys.size(-1))), keys


def values_of(attended: Tensor, weights: LatentWeights, mla: LatentAttention) -> Tensor:
    """Means of latents (n, 1, heads, kv_lora_rank) -> the heads' values (n, heads * v_head_dim)."""
    to_value = _by_head(weights.kv_up, mla)[:, mla.qk_nope_head_dim :]
    return torch.einsum("nghl,hvl->nhv", attended, to_value).flatten(1)


def _by_head(kv_up: Tensor, mla: LatentAttention) -> Tensor:
    """(heads, qk_nope_head_dim + v_head_dim, kv_lora_rank)."""
    return kv_up.unflatten(0, (-1, mla.qk_nope_head_dim + mla.v_head_dim))
