"""The model as rollout needs it: a forward pass over megatron-ordered weights, and nothing else."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, silu

from hpcrl.model.norm import rms_norm
from hpcrl.model.params import EMBEDDING, OUTPUT_LAYER, shards
from hpcrl.model.rope import apply_rope, rope_cos_sin
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.native.attention import Attention
from hpcrl.rollout.native.tensor_parallel import TensorParallel


class _Layer(NamedTuple):
    input_norm: Tensor
    qkv: Tensor
    proj: Tensor
    mlp_norm: Tensor
    fc1: Tensor
    fc2: Tensor


class Decoder:
    """`weights` maps global parameter names to this rank's shards, in buffers that never move."""

    def __init__(
        self, shape: ModelShape, tp: TensorParallel, dtype: torch.dtype, max_len: int, device: torch.device
    ) -> None:
        self.vocab_size = shape.vocab_size
        self._shape = shape
        self._tp = tp
        self._num_groups = shape.num_query_groups // tp.size
        self.weights = {
            shard.name: torch.zeros(shard.local_shape, dtype=dtype, device=device)
            for shard in shards(shape, tp_rank=tp.rank, tp_size=tp.size, pp_rank=0, pp_size=1)
        }
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
            for layer in range(shape.num_layers)
        ]
        self._embedding = self.weights[EMBEDDING]
        self._head = self.weights[EMBEDDING if shape.tie_word_embeddings else OUTPUT_LAYER]
        self._final_norm = self.weights["decoder.final_layernorm.weight"]
        self._cos, self._sin = rope_cos_sin(torch.arange(max_len, device=device), shape.head_dim, shape.rope_theta)

    def forward(self, token_ids: Tensor, attention: Attention, last: Tensor | None = None) -> Tensor:
        """Logits (rows, padded vocabulary) after each of the flat `token_ids` int64 (n,), or after those at `last`."""
        eps = self._shape.rms_norm_eps
        cos, sin = self._cos[attention.positions, None], self._sin[attention.positions, None]
        hidden = self._embed(token_ids)
        for number, layer in enumerate(self._layers):
            mixed = linear(rms_norm(hidden, layer.input_norm, eps), layer.qkv)
            hidden = hidden + self._tp.sum(linear(self._attend(number, mixed, attention, cos, sin), layer.proj))
            gate, up = linear(rms_norm(hidden, layer.mlp_norm, eps), layer.fc1).chunk(2, dim=-1)
            hidden = hidden + self._tp.sum(linear(silu(gate) * up, layer.fc2))
        if last is not None:
            hidden = hidden[last]
        return self._tp.gather_columns(linear(rms_norm(hidden, self._final_norm, eps), self._head))

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self._tp.size == 1:
            return embedding(token_ids, self._embedding)
        rows = len(self._embedding)
        local = token_ids - self._tp.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        found = embedding(local.masked_fill(elsewhere, 0), self._embedding)
        return self._tp.sum(found.masked_fill_(elsewhere[:, None], 0))

    def _attend(self, layer: int, mixed: Tensor, attention: Attention, cos: Tensor, sin: Tensor) -> Tensor:
        """`mixed` (n, rows of qkv) is grouped by KV head: its queries, its key, its value."""
        heads = mixed.view(len(mixed), self._num_groups, -1, self._shape.head_dim)
        rotated = apply_rope(heads[:, :, :-1], cos, sin)
        return attention(layer, rotated[:, :, :-1], rotated[:, :, -1], heads[:, :, -1]).flatten(1)
