"""The model's forward pass in rollout over weights in Megatron's layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from hpcrl.kernels.dispatch import use_triton
from hpcrl.kernels.fp8_matrix import Fp8Matrix, fp8_linear
from hpcrl.kernels.fp32_product import product
from hpcrl.kernels.layers import apply_rope
from hpcrl.model.blocks.attention import Rope
from hpcrl.model.blocks.attention_modules import CachedAttention
from hpcrl.model.blocks.block import Layer
from hpcrl.model.blocks.layers import NormStep, embedding_factor
from hpcrl.model.blocks.rope_angles import rope_cos_sin
from hpcrl.model.exact import TensorParallel, exact_linear
from hpcrl.model.params import EMBEDDING, OUTPUT_LAYER, TOWER, Shard, engine_layout, quantized_names, shards
from hpcrl.model.shape import ModelShape
from hpcrl.model.tower import build_tower


class PlainRotation:
    """Rotary embedding of heads (n, KV heads, heads, head_dim) at `positions` int64 (n,), or (3, n) of tokens with
    pictures, bitwise equal to the training model's."""

    def __init__(self, positions: Tensor) -> None:
        self._positions = positions
        self._angles: dict[Rope, tuple[Tensor, Tensor]] = {}

    def __call__(self, heads: Tensor, rope: Rope) -> Tensor:
        cos, sin = self.angles(rope)
        return apply_rope(heads, cos[:, None], sin[:, None])

    def angles(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, fp32 (n, rope.dim / 2)."""
        if rope not in self._angles:
            used = rope if self._positions.dim() == 2 else replace(rope, axes=None)
            self._angles[rope] = rope_cos_sin(self._positions, used)
        return self._angles[rope]


class FastRotation(PlainRotation):
    """The same up to rounding, for machines without its kernel: a product and a sum of products, with the halves of
    each head swapped."""

    def __init__(self, positions: Tensor) -> None:
        super().__init__(positions)
        self._doubled: dict[Rope, tuple[Tensor, Tensor]] = {}

    def __call__(self, heads: Tensor, rope: Rope) -> Tensor:
        if use_triton("rope", heads):
            return super().__call__(heads, rope)
        if rope.dim < heads.size(-1):
            return torch.cat((self(heads[..., : rope.dim], rope), heads[..., rope.dim :]), dim=-1)
        cos, sin = self._for_both_halves(rope)
        heads32 = heads.float()
        rotated32 = torch.addcmul(heads32 * cos, heads32.roll(heads.size(-1) // 2, -1), sin)
        return rotated32.to(heads.dtype)

    def _for_both_halves(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, (n, 1, 1, rope.dim)."""
        if rope not in self._doubled:
            cos, sin = (part[:, None, None] for part in self.angles(rope))
            self._doubled[rope] = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return self._doubled[rope]


class _Layer(NamedTuple):
    """Halves and norms that a layer does not have are None."""

    attention: Any
    mlp: Any
    before_attention: NormStep | None
    before_mlp: NormStep | None
    after_attention: NormStep | None
    after_mlp: NormStep | None

    @property
    def before(self) -> NormStep | None:
        """The norm of its input."""
        return self.before_mlp if self.attention is None else self.before_attention

    @property
    def num_chosen(self) -> int:
        """Experts of a token."""
        return 0 if self.mlp is None else int(self.mlp.num_chosen)


class TokenFeatures(NamedTuple):
    """Features of placeholder tokens (see `hpcrl.model.tower`). rows: int64 (F,), tokens of a call; values: (F, width),
    for their embeddings and for the first layers."""

    rows: Tensor
    values: tuple[Tensor, ...]


def _zeros(
    owned: Sequence[Shard], quantized: Collection[str], dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Return zeros for each shard by name; those of a layer's experts are in one tensor, for `ExpertWeights`."""
    stacks: dict[str, list[Shard]] = {}
    weights: dict[str, Tensor | Fp8Matrix] = {}
    for shard in owned:
        stacks.setdefault(re.sub(r"local_experts\.\d+", "local_experts", shard.name), []).append(shard)
    for members in stacks.values():
        size, is_fp8 = (len(members), *members[0].local_shape), members[0].name in quantized
        each: list[Tensor | Fp8Matrix]
        if is_fp8:
            each = [*Fp8Matrix.zeros(size, dtype, device).unbind()]
        else:
            each = [*torch.zeros(size, dtype=dtype, device=device).unbind()]
        weights |= {shard.name: weight for shard, weight in zip(members, each, strict=True)}
    return {shard.name: weights[shard.name] for shard in owned}


class Decoder:
    """The model's forward pass. `weights` maps global parameter names to this rank's shards, which are tensors, and
    `Fp8Matrix` for `quantized_names`."""

    def __init__(
        self,
        shape: ModelShape,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
        quantization: str | None = None,
    ) -> None:
        self.vocab_size = shape.softmax_size
        self._shape = shape
        self.tp = tp
        self._linear: Callable[[Tensor, Tensor], Tensor] = exact_linear if tp.exact else fp8_linear
        self._rotation = PlainRotation if tp.exact else FastRotation
        layout = engine_layout(shape, tp.size)
        self.weights = _zeros(shards(shape, layout, tp.rank), quantized_names(shape, quantization), dtype, device)
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
        return [self._layer(number, layer) for number, layer in enumerate(self._shape.layers)]

    def _bind(self) -> None:
        for bound in ("_layers", "_before_next", "needs_host"):
            vars(self).pop(bound, None)
        self._embedding = self.weights[EMBEDDING]
        self._head = self.weights[EMBEDDING if self._shape.tie_word_embeddings else OUTPUT_LAYER]
        if self.tower is not None:
            for name, parameter in self.tower.named_parameters():
                parameter.data = self.weights[f"{TOWER}{name}"]

    def _layer(self, number: int, layer: Layer) -> _Layer:
        def weight(name: str) -> Tensor:
            return self.weights[f"decoder.layers.{number}.{name}"]

        eps = self._shape.rms_norm_eps
        attention, mlp = (block.step(weight, self._linear, eps, self.tp) for block in layer.blocks)
        return _Layer(attention, mlp, **layer.norms.step(weight, eps))

    @cached_property
    def _before_next(self) -> list[NormStep | None]:
        """Of each layer, the next layer's first norm, or the final one."""
        shape, weight = self._shape, self.weights["decoder.final_layernorm.weight"]
        final = NormStep(weight, shape.rms_norm_eps, shape.layers[-1].norms.zero_centered)
        return [*(layer.before for layer in self._layers[1:]), final]

    @cached_property
    def needs_host(self) -> bool:
        """Whether a decode step reads numbers of the device, so that it cannot be captured in a CUDA graph."""
        return any(layer.mlp is not None and layer.mlp.needs_host for layer in self._layers)

    @property
    def routing_width(self) -> int:
        """Numbers that record a token's experts, in all layers."""
        return sum(layer.num_chosen for layer in self._layers)

    def forward(self, token_ids: Tensor, attention: CachedAttention, chosen: list[Tensor] | None = None) -> Tensor:
        """Return logits (n, padded vocabulary / tp), this rank's columns, after each of the flat `token_ids` integer
        (n,).

        Appends the experts of each MoE layer, int64 (n, topk), to `chosen`.
        """
        hidden = self.run(token_ids, attention, chosen, cache_only=False)
        if self.tp.exact:
            return exact_linear(hidden, self._head, torch.float32)
        if hidden.device.type == "cuda":
            return product(hidden, self._head.T)  # in fp32, as in training
        return self._linear(hidden, self._head)

    def run(
        self,
        token_ids: Tensor,
        attention: CachedAttention,
        chosen: list[Tensor] | None,
        features: TokenFeatures | None = None,
        *,
        cache_only: bool,
    ) -> Tensor:
        """Write keys and values of `token_ids` into the cache, and their experts into `chosen`. Return the head's input
        (n, hidden); with `cache_only` it stops as soon as the cache is written."""
        rotate = self._rotation(attention.new.rope_positions)
        hidden = self._embed(token_ids)
        if features is not None:
            hidden[features.rows] = features.values[0]
        first = self._layers[0].before
        normed = hidden if first is None else first(hidden)
        last = self._last_needed(chosen) if cache_only else None
        for number, layer in enumerate(self._layers):
            is_last, before_next = number == last, self._before_next[number]
            if is_last and (chosen is None or not layer.num_chosen):
                layer.attention.store(number, normed, attention, rotate)
                break
            if layer.attention is not None:
                attended = self.tp.sum(layer.attention(number, normed, attention, rotate))
                following = before_next if layer.mlp is None else layer.before_mlp
                normed = self._add(attended, hidden, layer.after_attention, following)
            if is_last:
                layer.mlp.route(normed, chosen)
                break
            if layer.mlp is not None:
                output = self.tp.sum(layer.mlp(normed, chosen))
                if features is not None and number + 1 < len(features.values):
                    output[features.rows] += features.values[number + 1]
                normed = self._add(output, hidden, layer.after_mlp, before_next)
        return normed

    def _last_needed(self, chosen: list[Tensor] | None) -> int:
        """Return the last layer that caches something, or chooses experts that are wanted."""
        layers = enumerate(self._layers)
        return max(n for n, it in layers if it.attention is not None or (chosen is not None and it.num_chosen))

    def _embed(self, token_ids: Tensor) -> Tensor:
        found, scale = self._embeddings(token_ids), self._shape.embedding_scale
        return found if scale == 1.0 else found * embedding_factor(scale, found)

    def _embeddings(self, token_ids: Tensor) -> Tensor:
        if self.tp.size == 1:
            return embedding(token_ids, self._embedding)
        rows = len(self._embedding)
        local = token_ids - self.tp.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        found = embedding(local.masked_fill(elsewhere, 0), self._embedding)
        return self.tp.sum(found.masked_fill_(elsewhere[:, None], 0))

    def _add(self, output: Tensor, hidden: Tensor, after: NormStep | None, before: NormStep | None) -> Tensor:
        """Add a block's output to the residual `hidden` in place. Return the next block's input.

        Args:
            after, before: the norms of the two.
        """
        if after is not None:
            output = after(output)
        if before is not None and not self.tp.exact:
            return before.after_sum(output, hidden)
        hidden += output
        return hidden if before is None else before(hidden)  # in exact mode by the kernel of training
