"""Layers of Transformer Engine without a GPU: when they are left out, and what is an error."""

from __future__ import annotations

import pytest
import torch
from megatron.core.extensions import transformer_engine as te
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from hpcrl.config.schema import TransformerEngineConfig
from hpcrl.model.build import use_transformer_engine, uses_transformer_engine
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.megatron_versions import mlp_submodules

SHAPE = ModelShape(2, 64, 96, 4, 2, 16, 500)
CPU = torch.device("cpu")


def test_it_is_left_out_without_a_gpu():
    for cfg in (None, TransformerEngineConfig(), TransformerEngineConfig(enable=False)):
        assert not uses_transformer_engine(cfg, CPU, SHAPE, exact=False)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"enable": True}, "enable=true, but there is no GPU; remove it"),
        ({"fp8": "hybrid"}, "fp8=hybrid needs Transformer Engine, but there is no GPU; set fp8 to null"),
    ],
)
def test_what_it_is_asked_for_in_vain(settings, message):
    with pytest.raises(InputError, match=message):
        uses_transformer_engine(TransformerEngineConfig(**settings), CPU, SHAPE, exact=False)


@pytest.mark.parametrize("num_experts", [None, 4])
def test_its_layers_take_the_places_of_megatrons(num_experts):
    spec = get_gpt_layer_local_spec(num_experts=num_experts, moe_grouped_gemm=False, normalization="RMSNorm")
    use_transformer_engine(spec)
    layer = spec.submodules
    mlp = mlp_submodules(spec)[0]
    assert layer.input_layernorm is layer.pre_mlp_layernorm is te.TENorm
    assert layer.self_attention.submodules.linear_qkv is mlp.linear_fc1 is te.TEColumnParallelLinear
    assert layer.self_attention.submodules.linear_proj is mlp.linear_fc2 is te.TERowParallelLinear
