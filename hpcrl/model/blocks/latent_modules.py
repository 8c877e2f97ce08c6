"""Modules of multi-head latent attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import Attention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from hpcrl.kernels.layers import apply_rope
from hpcrl.model.blocks.attention_modules import PackedAttention
from hpcrl.model.blocks.layers import LATENT_NORM_EPS, RMSNorm
from hpcrl.model.blocks.rope import deinterleave
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
        self._mla, self._key_width = block.widths, block.head_dim
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
        rotary_queries = apply_rope(deinterleave(rotary_queries), *packed.angles)
        rotary_key = apply_rope(deinterleave(rotary_key.unsqueeze(1)), *packed.angles)
        rotary_keys = rotary_key.expand(-1, keys.size(1), -1)
        return torch.cat([queries, rotary_queries], -1), torch.cat([keys, rotary_keys], -1), values


class ToLatent(torch.nn.Module):
    """A linear layer that every tensor-parallel rank holds whole."""

    def __init__(self, config: TransformerConfig, columns: int, rows: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(rows, columns, dtype=config.params_dtype))
        # Megatron sums the gradients of parameters with this mark over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight)


class RotatedAttention(PackedAttention):
    """Core attention whose queries and keys have their rotary embedding already."""

    def rotate(self, heads: Tensor, packed: PackedTokens) -> Tensor:
        return heads


def latent_attention(block: Latent) -> ModuleSpec:
    """Return the spec of `self_attention` in megatron's local layer."""
    return ModuleSpec(
        module=LatentSelfAttention,
        params={"block": block},
        submodules=SelfAttentionSubmodules(
            linear_qkv=None, core_attention=RotatedAttention, linear_proj=RowParallelLinear
        ),
    )
