"""Multi-head latent attention: a layer of megatron, and the step in rollout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import Attention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from hpcrl.kernels.layers import apply_rope, rms_norm
from hpcrl.model.blocks.attention_modules import CachedAttention, Linear, PackedAttention, Rotation
from hpcrl.model.blocks.layers import LATENT_NORM_EPS, RMSNorm, mark
from hpcrl.model.blocks.rope_angles import deinterleave
from hpcrl.model.gpt import PackedTokens

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from hpcrl.model.blocks.latent import Latent


class LatentSelfAttention(Attention):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) as a layer of megatron.

    Every tensor-parallel rank computes the latents of its own tokens; the heads are split. Megatron 0.16's own layer
    needs Transformer Engine and process-global groups, and splits the projections to the latents, which it then
    gathers.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        *,
        block: Latent,
        pg_collection: ProcessGroupCollection,
        **_: object,
    ) -> None:
        super().__init__(config, submodules, layer_number, AttnMaskType.causal, "self", pg_collection=pg_collection)
        assert block.rope is not None
        self._mla, self._key_width, self._rope = block.widths, block.head_dim, block.rope
        mla, hidden, heads = block.widths, block.hidden_size, block.num_heads
        if mla.q_lora_rank is None:
            self.linear_q_proj = self._by_head(hidden, heads * block.head_dim)
        else:
            self.linear_q_down_proj = ToLatent(config, hidden, mla.q_lora_rank)
            self.q_layernorm = RMSNorm(config, mla.q_lora_rank, LATENT_NORM_EPS)
            self.linear_q_up_proj = self._by_head(mla.q_lora_rank, heads * block.head_dim)
        self.linear_kv_down_proj = ToLatent(config, hidden, mla.kv_lora_rank + mla.qk_rope_head_dim)
        self.kv_layernorm = RMSNorm(config, mla.kv_lora_rank, LATENT_NORM_EPS)
        self.linear_kv_up_proj = self._by_head(mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim))

    def _by_head(self, columns: int, rows: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            columns,
            rows,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            gather_output=False,
            tp_group=self.tp_group,
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, packed_seq_params: PackedTokens, **_: Any
    ) -> tuple[Tensor, None]:
        """`hidden_states` (S / tp, 1, hidden) with sequence parallelism, else (S, 1, hidden) -> the same shape."""
        heads = self.get_query_key_value_tensors(hidden_states, packed_seq_params)
        if self.checkpoint_core_attention and self.training:
            attend = self._checkpointed_attention_forward
        else:
            attend = self.core_attention
        attended = attend(
            *heads, attention_mask, attn_mask_type=self.attn_mask_type, packed_seq_params=packed_seq_params
        )
        return self.linear_proj(attended.unsqueeze(1))

    def get_query_key_value_tensors(  # type: ignore[override]
        self, hidden_states: Tensor, packed: PackedTokens
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys (S, heads / tp, head_dim), values (S, heads / tp, v_head_dim), after rotary
        embedding."""
        mla, hidden = self._mla, hidden_states.squeeze(1)
        if mla.q_lora_rank is None:
            queries = self.linear_q_proj(hidden)[0]
        else:
            queries = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))[0]
        queries, rotary_queries = queries.unflatten(-1, (-1, self._key_width)).split(
            [mla.qk_nope_head_dim, mla.qk_rope_head_dim], -1
        )
        latent, rotary_key = self.linear_kv_down_proj(hidden).split([mla.kv_lora_rank, mla.qk_rope_head_dim], -1)
        # All heads share this key: each rank has a part of its gradient.
        if self.config.sequence_parallel:
            rotary_key = gather_from_sequence_parallel_region(rotary_key, group=self.tp_group)
        else:
            rotary_key = copy_to_tensor_model_parallel_region(rotary_key, self.tp_group)
        heads = self.linear_kv_up_proj(self.kv_layernorm(latent))[0]
        keys, values = heads.unflatten(-1, (-1, mla.qk_nope_head_dim + mla.v_head_dim)).split(
            [mla.qk_nope_head_dim, mla.v_head_dim], -1
        )
        angles = packed.angles(self._rope)
        rotary_queries = apply_rope(deinterleave(rotary_queries), *angles)
        rotary_key = apply_rope(deinterleave(rotary_key.unsqueeze(1)), *angles)
        rotary_keys = rotary_key.expand(-1, keys.size(1), -1)
        return torch.cat([queries, rotary_queries], -1), torch.cat([keys, rotary_keys], -1), values


class ToLatent(torch.nn.Module):
    """A linear layer that every tensor-parallel rank holds whole."""

    def __init__(self, config: TransformerConfig, columns: int, rows: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(rows, columns, dtype=config.params_dtype))
        # Megatron sums the gradients of parameters with this mark over the tensor-parallel ranks.
        mark(self.weight, sequence_parallel=config.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight)


def latent_attention(block: Latent) -> ModuleSpec:
    """Return the spec of `self_attention` in megatron's local layer."""
    return ModuleSpec(
        module=LatentSelfAttention,
        params={"block": block},
        submodules=SelfAttentionSubmodules(
            linear_qkv=None, core_attention=PackedAttention, linear_proj=RowParallelLinear
        ),
    )


class LatentStep:
    """Latent attention in rollout, which caches latents (section 2.1.2 of the paper).

    A head's key is a linear map of the token's latent; the map is applied to the query instead, so that all heads
    attend to the latents themselves, and the attended latents are mapped to the heads' values afterwards.
    """

    def __init__(self, block: Latent, weight: Callable[[str], Tensor], linear: Linear) -> None:
        def of(name: str) -> Tensor:
            return weight(f"self_attention.{name}.weight")

        self._block, self._widths, self._linear = block, block.widths, linear
        self._kv_down, self._kv_norm, self._kv_up = (
            of(name) for name in ("linear_kv_down_proj", "kv_layernorm", "linear_kv_up_proj")
        )
        self._proj = of("linear_proj")
        self._q_down: tuple[Tensor, Tensor] | None = None  # and its norm
        if self._widths.q_lora_rank is None:
            self._q_up = of("linear_q_proj")
        else:
            self._q_down, self._q_up = (of("linear_q_down_proj"), of("q_layernorm")), of("linear_q_up_proj")

    def __call__(self, layer: int, x: Tensor, attention: CachedAttention, rotate: Rotation) -> Tensor:
        """Map x (n, hidden) to this rank's part of the output (n, hidden)."""
        attended = attention(layer, *self._heads(x, rotate))
        to_value = self._by_head[:, self._widths.qk_nope_head_dim :]
        return self._linear(torch.einsum("nghl,hvl->nhv", attended, to_value).flatten(1), self._proj)

    def store(self, layer: int, x: Tensor, attention: CachedAttention, rotate: Rotation) -> None:
        """Write to the cache only."""
        _, keys, values = self._heads(x, rotate)
        attention.new.store(layer, keys, values)

    def _heads(self, x: Tensor, rotate: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (n, 1, heads of this rank, width), keys (n, 1, width) and values (n, 1, kv_lora_rank), with
        width = kv_lora_rank + qk_rope_head_dim, for an attention that divides by the square root of this width."""
        widths, linear = self._widths, self._linear
        queries = x if self._q_down is None else rms_norm(linear(x, self._q_down[0]), self._q_down[1], LATENT_NORM_EPS)
        queries, rotary_queries = (
            linear(queries, self._q_up)
            .unflatten(-1, (1, -1, self._block.head_dim))
            .split([widths.qk_nope_head_dim, widths.qk_rope_head_dim], -1)
        )
        latent, rotary_key = linear(x, self._kv_down).split([widths.kv_lora_rank, widths.qk_rope_head_dim], -1)
        latent = rms_norm(latent, self._kv_norm, LATENT_NORM_EPS)
        assert self._block.rope is not None
        rotated = rotate(deinterleave(torch.cat((rotary_queries, rotary_key[:, None, None]), dim=2)), self._block.rope)
        to_key = self._by_head[:, : widths.qk_nope_head_dim]
        queries = torch.cat((torch.einsum("nghd,hdl->nghl", queries, to_key), rotated[:, :, :-1]), -1)
        keys = torch.cat((latent[:, None], rotated[:, :, -1]), -1)
        scale = self._block.softmax_scale * math.sqrt(keys.size(-1))
        return queries * scale, keys, keys[..., : widths.kv_lora_rank]

    @property
    def _by_head(self) -> Tensor:
        """(heads, qk_nope_head_dim + v_head_dim, kv_lora_rank)."""
        return self._kv_up.unflatten(0, (-1, self._widths.qk_nope_head_dim + self._widths.v_head_dim))
