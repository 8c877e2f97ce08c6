"""The model as rollout needs it: a forward pass over megatron-ordered weights, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, silu

from hpcrl.model.norm import rms_norm
from hpcrl.model.params import EMBEDDING, OUTPUT_LAYER, shards
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.native.attention import Attention
from hpcrl.rollout.native.rope import FastRope, Rotation
from hpcrl.rollout.native.tensor_parallel import TensorParallel

Linear = Callable[[Tensor, Tensor], Tensor]


class _Layer(NamedTuple):
    input_norm: Tensor
    qkv: Tensor
    proj: Tensor
    mlp_norm: Tensor
    fc1: Tensor
    fc2: Tensor


class Decoder:
    """`weights` maps global parameter names to this rank's shards; `linear(x, weight)` is the matrix product.

    `rotation` makes the rotary embedding of one call.
    """

    def __init__(
        self,
        shape: ModelShape,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
        linear: Linear = torch.nn.functional.linear,
        rotation: Rotation = FastRope,
    ) -> None:
        self.vocab_size = shape.vocab_size
        self._shape = shape
        self._tp = tp
        self._linear = linear
        self._rotation = rotation
        self._num_groups = shape.num_query_groups // tp.size
        self.weights = {
            shard.name: torch.zeros(shard.local_shape, dtype=dtype, device=device)
            for shard in shards(shape, tp_rank=tp.rank, tp_size=tp.size, pp_rank=0, pp_size=1)
        }
        self._bind()

    def adopt(self, name: str, tensor: Tensor) -> None:
        """`tensor` takes the place of weight `name`."""
        own = self.weights[name]
        if (own.shape, own.dtype, own.device) != (tensor.shape, tensor.dtype, tensor.device):
            raise ValueError(
                f"weight {name} is {tuple(own.shape)} {own.dtype} on {own.device}, the tensor to adopt "
                f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; copy it instead"
            )
        self.weights[name] = tensor.detach()
        self._bind()

    def _bind(self) -> None:
        self._layers = [
            _Layer(
                *(
                    self.weights[f"decoder.layers.{layer}.{name}.weight"]
                    for name in (
                        "input_layernorm",
                        "self_attention.linear_qkv",
                        "self_attention.linear_proj",
                        "pre_mlp_layernorm",
                        "mlp.linear_fc1",
                        "mlp.linear_fc2",
                    )
                )
            )
            for layer in range(self._shape.num_layers)
        ]
        self._embedding = self.weights[EMBEDDING]
        self._head = self.weights[EMBEDDING if self._shape.tie_word_embeddings else OUTPUT_LAYER]
        self._final_norm = self.weights["decoder.final_layernorm.weight"]

    def forward(self, token_ids: Tensor, attention: Attention) -> Tensor:
        """Logits (n, padded vocabulary) after each of the flat `token_ids` integer (n,)."""
        hidden = self._run(token_ids, attention, cache_only=False)
        logits = self._linear(rms_norm(hidden, self._final_norm, self._shape.rms_norm_eps), self._head)
        return self._tp.gather_columns(logits)

    def fill(self, token_ids: Tensor, attention: Attention) -> None:
        """Only puts keys and values of `token_ids` into the cache."""
        self._run(token_ids, attention, cache_only=True)

    def _run(self, token_ids: Tensor, attention: Attention, cache_only: bool) -> Tensor:
        eps = self._shape.rms_norm_eps
        rotate = self._rotation(attention.new.positions, self._shape.head_dim, self._shape.rope_theta)
        hidden = self._embed(token_ids)
        for number, layer in enumerate(self._layers):
            mixed = self._linear(rms_norm(hidden, layer.input_norm, eps), layer.qkv)
            # (n, KV heads, queries of a head + key + value, head_dim)
            heads = mixed.view(len(mixed), self._num_groups, -1, self._shape.head_dim)
            rotated = rotate(heads[:, :, :-1])
            queries, keys, values = rotated[:, :, :-1], rotated[:, :, -1], heads[:, :, -1]
            if cache_only and number == len(self._layers) - 1:
                attention.new.store(number, keys, values)
                break
            attended = attention(number, queries, keys, values).flatten(1)
            hidden += self._tp.sum(self._linear(attended, layer.proj))
            gate, up = self._linear(rms_norm(hidden, layer.mlp_norm, eps), layer.fc1).chunk(2, dim=-1)
            hidden += self._tp.sum(self._linear(silu(gate).mul_(up), layer.fc2))
        return hidden

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self._tp.size == 1:
            return embedding(token_ids, self._embedding)
        rows = len(self._embedding)
        local = token_ids - self._tp.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        found = embedding(local.masked_fill(elsewhere, 0), self._embedding)
        return self._tp.sum(found.masked_fill_(elsewhere[:, None], 0))
