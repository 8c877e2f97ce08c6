"""The model's forward pass in rollout over weights in Megatron's layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import embedding, linear

from hpcrl.kernels.dispatch import use_triton
from hpcrl.kernels.fp32_product import product
from hpcrl.kernels.grouped_experts import Experts, mixture
from hpcrl.kernels.layers import add_rms_norm, apply_rope, rms_norm, swiglu
from hpcrl.kernels.store_heads import HeadWeights
from hpcrl.model.blocks.rope import rope_cos_sin
from hpcrl.model.blocks.router import by_expert, route
from hpcrl.model.exact import exact_linear, exact_sum
from hpcrl.model.params import EMBEDDING, OUTPUT_LAYER, TOWER, Shard, engine_layout, shards
from hpcrl.model.shape import ModelShape
from hpcrl.model.tower import build_tower
from hpcrl.rollout.engines.native.attention import (
    Attention,
    LatentWeights,
    PagedAttention,
    queries_and_keys,
    values_of,
)


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


class PlainRope:
    """Rotary embedding of heads (n, KV heads, heads, head_dim) at `positions` int64 (n,), or (3, n) of tokens with
    pictures, bitwise equal to the training model's."""

    def __init__(self, positions: Tensor, shape: ModelShape) -> None:
        axes = shape.vision.rope_axes if shape.vision is not None and positions.dim() == 2 else None
        options = shape.rope_theta, shape.rope_scaling, axes
        self._cos, self._sin = rope_cos_sin(positions[..., None], shape.rope_dim, *options)

    def __call__(self, heads: Tensor) -> Tensor:
        return apply_rope(heads, self._cos, self._sin)

    @property
    def angles(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines, fp32 (n, head_dim / 2)."""
        return self._cos.squeeze(1), self._sin.squeeze(1)


class FastRope(PlainRope):
    """The same up to rounding, for machines without its kernel: a product and a sum of products, with the halves of
    each head swapped."""

    def __call__(self, heads: Tensor) -> Tensor:
        if use_triton("rope", heads):
            return super().__call__(heads)
        cos, sin = self._doubled
        heads32 = heads.float()
        rotated32 = torch.addcmul(heads32 * cos, heads32.roll(heads.size(-1) // 2, -1), sin)
        return rotated32.to(heads.dtype)

    @cached_property
    def _doubled(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines for both halves of a head, (n, 1, 1, head_dim)."""
        cos, sin = self._cos.unsqueeze(-2), self._sin.unsqueeze(-2)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


class _Layer(NamedTuple):
    """fc1, fc2: of the layer, or one per expert. experts: these weights for grouped products, if possible. shared_fc1,
    shared_fc2: of the shared experts of all tokens. next_norm: the next layer's first norm, or the final one. Either
    qkv or latent is set."""

    proj: Tensor
    mlp_norm: Tensor
    next_norm: Tensor
    fc1: list[Tensor]
    fc2: list[Tensor]
    experts: Experts | None = None
    block: Any = None
    router: Tensor | None = None
    router_bias: Tensor | None = None
    shared_fc1: Tensor | None = None
    shared_fc2: Tensor | None = None
    latent: LatentWeights | None = None
    qkv: Tensor | None = None
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


class TokenFeatures(NamedTuple):
    """Features of placeholder tokens (see `hpcrl.model.tower`). rows: int64 (F,), tokens of a call; values: (F, width),
    for their embeddings and for the first layers."""

    rows: Tensor
    values: tuple[Tensor, ...]


def _zeros(owned: Sequence[Shard], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Return zeros for each shard by name; those of a layer's experts are in one tensor, for `Experts`."""
    stacks: dict[str, list[Shard]] = {}
    for shard in owned:
        stacks.setdefault(re.sub(r"local_experts\.\d+", "local_experts", shard.name), []).append(shard)
    found: dict[str, Tensor] = {}
    for members in stacks.values():
        stack = torch.zeros(len(members), *members[0].local_shape, dtype=dtype, device=device)
        found |= {shard.name: weight for shard, weight in zip(members, stack, strict=True)}
    return {shard.name: found[shard.name] for shard in owned}


class Decoder:
    """The model's forward pass. `weights` maps global parameter names to this rank's shards."""

    def __init__(self, shape: ModelShape, tp: TensorParallel, dtype: torch.dtype, device: torch.device) -> None:
        self.vocab_size = shape.softmax_size
        self._shape = shape
        self.tp = tp
        self._linear: Callable[[Tensor, Tensor], Tensor] = exact_linear if tp.exact else linear
        self._rotation = PlainRope if tp.exact else FastRope
        self._num_groups = shape.num_query_groups // tp.size
        layout = engine_layout(shape, tp.size)
        self.weights = _zeros(shards(shape, layout, tp.rank), dtype, device)
        self.vision, self.tower = shape.vision, None
        if shape.vision is not None:
            with device:
                self.tower = build_tower(shape, dtype).requires_grad_(False)
        self._bind()

    def adopt(self, name: str, tensor: Tensor) -> None:
        """Replace weight `name` by `tensor`."""
        own = self.weights[name]
        if (own.shape, own.dtype, own.device) != (tensor.shape, tensor.dtype, tensor.device):
            raise ValueError(
                f"weight {name} is {tuple(own.shape)} {own.dtype} on {own.device}, the tensor to adopt "
                f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; copy it instead"
            )
        self.weights[name] = tensor.detach()
        self._bind()

    @cached_property
    def _layers(self) -> list[_Layer]:
        names = {"proj": "self_attention.linear_proj.weight", "mlp_norm": "pre_mlp_layernorm.weight"}
        if self._shape.mla is None:
            names["qkv"] = "self_attention.linear_qkv.weight"
        if self._shape.qkv_bias:
            names["qkv_bias"] = "self_attention.linear_qkv.bias"
        if self._shape.qk_norm:
            names |= {f"{head}_norm": f"self_attention.{head}_layernorm.weight" for head in "qk"}
        return [self._layer(layer, names) for layer in range(self._shape.num_layers)]

    def _bind(self) -> None:
        vars(self).pop("_layers", None)
        self._embedding = self.weights[EMBEDDING]
        self._head = self.weights[EMBEDDING if self._shape.tie_word_embeddings else OUTPUT_LAYER]
        self._first_norm = self.weights["decoder.layers.0.input_layernorm.weight"]
        if self.tower is not None:
            for name, parameter in self.tower.named_parameters():
                parameter.data = self.weights[f"{TOWER}{name}"]

    def _layer(self, layer: int, names: dict[str, str]) -> _Layer:
        def weight(name: str) -> Tensor:
            return self.weights[f"decoder.layers.{layer}.{name}"]

        shape = self._shape
        following = "final_layernorm" if layer + 1 == shape.num_layers else f"layers.{layer + 1}.input_layernorm"
        parts: dict[str, Any] = {part: weight(name) for part, name in names.items()}
        parts["next_norm"] = self.weights[f"decoder.{following}.weight"]
        if shape.mla is not None:
            parts["latent"] = LatentWeights.of_layer(shape.mla, weight)
        if not shape.is_moe_layer(layer):
            return _Layer(**parts, fc1=[weight("mlp.linear_fc1.weight")], fc2=[weight("mlp.linear_fc2.weight")])
        if shape.moe_score_bias:
            parts["router_bias"] = weight("mlp.router.expert_bias")
        if shape.moe_shared_ffn_hidden_size:
            parts |= {f"shared_{fc}": weight(f"mlp.shared_experts.linear_{fc}.weight") for fc in ("fc1", "fc2")}
        fc1, fc2 = (
            [weight(f"mlp.experts.local_experts.{number}.linear_{fc}.weight") for number in range(shape.num_experts)]
            for fc in ("fc1", "fc2")
        )
        # A CPU does not wait for counts, and its grouped product also takes time for experts without tokens.
        experts = None if fc1[0].device.type == "cpu" else Experts.of(fc1, fc2)
        return _Layer(
            **parts,
            fc1=fc1,
            fc2=fc2,
            block=shape.layers[layer].mlp,
            router=weight("mlp.router.weight"),
            experts=experts,
        )

    @property
    def routing_width(self) -> int:
        """Numbers that record a token's experts, in all layers."""
        return len(self._shape.moe_layers) * self._shape.moe_topk

    def forward(self, token_ids: Tensor, attention: Attention, chosen: list[Tensor] | None = None) -> Tensor:
        """Return logits (n, padded vocabulary / tp), this rank's columns, after each of the flat `token_ids` integer
        (n,).

        Appends the experts of each MoE layer, int64 (n, topk), to `chosen`.
        """
        hidden = self._run(token_ids, attention, chosen, cache_only=False)
        if hidden.device.type == "cuda":
            return product(hidden, self._head.T)  # in fp32, as in training
        return self._linear(hidden, self._head)

    def fill(
        self,
        token_ids: Tensor,
        attention: Attention,
        chosen: list[Tensor] | None = None,
        features: TokenFeatures | None = None,
    ) -> None:
        """Write keys and values of `token_ids` into the cache, and their experts into `chosen`."""
        self._run(token_ids, attention, chosen, features, cache_only=True)

    def _run(
        self,
        token_ids: Tensor,
        attention: Attention,
        chosen: list[Tensor] | None,
        features: TokenFeatures | None = None,
        *,
        cache_only: bool,
    ) -> Tensor:
        """Return the head's input (n, hidden). With `cache_only` it stops as soon as the cache is written."""
        eps = self._shape.rms_norm_eps
        rotate = self._rotation(attention.new.rope_positions, self._shape)
        hidden = self._embed(token_ids)
        if features is not None:
            hidden[features.rows] = features.values[0]
        normed = rms_norm(hidden, self._first_norm, eps)
        for number, layer in enumerate(self._layers):
            is_last = cache_only and number == len(self._layers) - 1
            if is_last and (chosen is None or layer.router is None):
                _, keys, values = self._heads(normed, layer, rotate)
                attention.new.store(number, keys, values)
                break
            attended = self._attended(number, normed, layer, attention, rotate)
            attended = self.tp.sum(self._linear(attended.flatten(1), layer.proj))
            normed = add_rms_norm(attended, hidden, layer.mlp_norm, eps)
            if layer.router is None:
                output = self._mlp(normed, layer.fc1[0], layer.fc2[0])
            else:
                logits = self._linear(normed.float(), layer.router.float())
                weights, ids = route(logits, layer.block, layer.router_bias)
                if chosen is not None:
                    chosen.append(ids)
                if is_last:
                    break
                output = self._mixture(normed, weights, ids, layer)
            output = self.tp.sum(output)
            if features is not None and number + 1 < len(features.values):
                output[features.rows] += features.values[number + 1]
            normed = add_rms_norm(output, hidden, layer.next_norm, eps)
        return normed

    def _attended(self, number: int, x: Tensor, layer: _Layer, attention: Attention, rotate: PlainRope) -> Tensor:
        """Return what the heads of layer `number` attend to, (n, KV heads, queries of a head, value_dim)."""
        if layer.qkv is not None and isinstance(attention, PagedAttention):
            weights = HeadWeights(layer.qkv_bias, layer.q_norm, layer.k_norm, self._shape.rms_norm_eps)
            return attention.of_product(number, self._linear(x, layer.qkv), weights, *rotate.angles)
        attended = attention(number, *self._heads(x, layer, rotate))
        if layer.latent is None or self._shape.mla is None:
            return attended
        return values_of(attended, layer.latent, self._shape.mla)

    def _heads(self, x: Tensor, layer: _Layer, rotate: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values in the form of `hpcrl.rollout.engines.native.attention`."""
        if layer.latent is not None:
            queries, keys = queries_and_keys(x, layer.latent, self._shape, self._linear, rotate)
            return queries, keys, keys[..., : -self._shape.rope_dim]
        assert layer.qkv is not None
        mixed = self._linear(x, layer.qkv)
        if layer.qkv_bias is not None:
            mixed = mixed + layer.qkv_bias
        # (n, KV heads, queries of a head + key + value, head_dim)
        heads = mixed.view(len(mixed), self._num_groups, -1, self._shape.head_dim)
        rotated = rotate(self._normed(heads[:, :, :-1], layer))
        return rotated[:, :, :-1], rotated[:, :, -1], heads[:, :, -1]

    def _mlp(self, x: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
        return self._linear(swiglu(self._linear(x, fc1)), fc2)

    def _mixture(self, x: Tensor, weights: Tensor, ids: Tensor, layer: _Layer) -> Tensor:
        """Return this rank's part of the weighted sum of each token's experts, `weights` and `ids` (n, topk)."""
        if layer.experts is not None:
            mixed = mixture(x, weights, ids, layer.experts)
        else:
            places, counts = by_expert(ids, self._shape.num_experts)
            rows = places // self._shape.moe_topk
            outputs = [
                self._mlp(part, fc1, fc2)
                for part, fc1, fc2 in zip(x[rows].split(counts), layer.fc1, layer.fc2, strict=True)
                if len(part)
            ]
            weighted = x.new_empty(len(places), x.size(1))
            weighted[places] = torch.cat(outputs)
            mixed = (weighted.unflatten(0, weights.shape) * weights.unsqueeze(-1).to(x.dtype)).sum(1)
        if layer.shared_fc1 is not None and layer.shared_fc2 is not None:
            mixed += self._mlp(x, layer.shared_fc1, layer.shared_fc2)
        return mixed

    def _normed(self, heads: Tensor, layer: _Layer) -> Tensor:
        """Normalise each head of queries and key (n, KV heads, heads, head_dim) in models with QK norm."""
        if layer.q_norm is None or layer.k_norm is None:
            return heads
        eps = self._shape.rms_norm_eps
        queries, key = rms_norm(heads[:, :, :-1], layer.q_norm, eps), rms_norm(heads[:, :, -1:], layer.k_norm, eps)
        return torch.cat((queries, key), dim=2)

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self.tp.size == 1:
            return embedding(token_ids, self._embedding)
        rows = len(self._embedding)
        local = token_ids - self.tp.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        found = embedding(local.masked_fill(elsewhere, 0), self._embedding)
        return self.tp.sum(found.masked_fill_(elsewhere[:, None], 0))
