"""Small models of several kinds, for tests of the planner and of the time model. No torch."""

from __future__ import annotations

from dataclasses import replace

from hpcrl.model.blocks.attention import Attention
from hpcrl.model.blocks.block import half_layer
from hpcrl.model.blocks.feed_forward import FeedForward
from hpcrl.model.blocks.gated_delta import GatedDelta
from hpcrl.model.blocks.mamba import Mamba
from hpcrl.model.blocks.mixture import MixtureOfExperts
from hpcrl.model.blocks.norms import Norms
from hpcrl.model.families.config_json import shape_from_hf
from hpcrl.model.shape import LatentAttention, ModelShape

SHAPE = ModelShape(
    num_layers=5,
    hidden_size=96,
    ffn_hidden_size=208,
    num_attention_heads=8,
    num_query_groups=4,
    head_dim=16,
    vocab_size=1000,
)
MOE = replace(SHAPE, num_experts=8, moe_ffn_hidden_size=72, moe_topk=2, dense_layers=(0,), qk_norm=True)
DEEPSEEK = replace(
    SHAPE,
    num_query_groups=8,
    head_dim=24,
    mla=LatentAttention(48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16),
    num_experts=8,
    moe_ffn_hidden_size=72,
    dense_layers=(0,),
    moe_shared_ffn_hidden_size=72,
    moe_score_function="sigmoid",
    moe_score_bias=True,
    moe_num_groups=4,
    moe_topk_groups=2,
    moe_group_best=2,
)
_NET = GatedDelta(96, num_k_heads=4, num_v_heads=8, head_k_dim=16, head_v_dim=16)
DELTA = replace(  # the last of five layers has attention
    SHAPE, blocks=tuple(it if n == 4 else replace(it, attention=_NET) for n, it in enumerate(SHAPE.layers))
)
_MAMBA = half_layer(Mamba(96, num_heads=8, head_dim=24, num_groups=4, state_dim=16), "attention", Norms())
_ATTENTION = half_layer(Attention(96, None, 8, 4, 16), "attention", Norms())
_MLP = half_layer(FeedForward(96, 208, "relu2", is_gated=False), "mlp", Norms())
_EXPERTS = MixtureOfExperts(96, 8, 72, 2, shared_ffn_hidden_size=72, score_function="sigmoid", is_gated=False)
_MIXTURE = half_layer(_EXPERTS, "mlp", Norms())
# Every layer has one block.
HYBRID = replace(SHAPE, num_layers=6, blocks=(_MAMBA, _MIXTURE, _ATTENTION, _MLP, _MAMBA, _MIXTURE))
GPT_OSS = shape_from_hf(
    {
        "model_type": "gpt_oss",
        "num_hidden_layers": 5,
        "hidden_size": 96,
        "intermediate_size": 72,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "vocab_size": 1000,
        "sliding_window": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
)
