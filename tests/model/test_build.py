"""Layers of Transformer Engine without a GPU and without it: when they are used, for what, and what is an error."""

from __future__ import annotations

import logging
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.extensions import transformer_engine as te
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe import moe_utils

from hpcrl.config.schema import TransformerEngineConfig
from hpcrl.model import build, params
from hpcrl.model.blocks.layers import RMSNorm
from hpcrl.model.build import _replaced, use_transformer_engine, uses_transformer_engine
from hpcrl.model.params import shards
from hpcrl.model.shape import ModelShape
from hpcrl.runtime import megatron_versions
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.groups import fake_rank
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.megatron_versions import mlp_submodules

SHAPE = ModelShape(2, 64, 96, 4, 2, 16, 500)
QWEN2_5_1_5B = ModelShape(2, 1536, 8960, 12, 2, 128, 512)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("transformer_engine")
    module.__spec__ = ModuleSpec("transformer_engine", None)
    monkeypatch.setitem(sys.modules, "transformer_engine", module)


@pytest.mark.parametrize(
    "settings, is_used",
    [(None, False), ({}, False), ({"enable": False}, False), ({"enable": True}, True), ({"fp8": "hybrid"}, True)],
)
def test_it_is_used_where_it_is_asked_for(installed: None, settings: dict[str, Any] | None, is_used: bool) -> None:
    cfg = None if settings is None else TransformerEngineConfig(**settings)
    assert uses_transformer_engine(cfg, GPU, SHAPE, exact=False) is is_used
    if not is_used:
        assert not uses_transformer_engine(cfg, CPU, SHAPE, exact=True)


@pytest.mark.parametrize(
    "settings, device, message",
    [
        ({"enable": True}, CPU, "enable=true, but there is no GPU; remove it"),
        ({"fp8": "hybrid"}, CPU, "fp8=hybrid needs Transformer Engine, but there is no GPU; set fp8 to null"),
        ({"fp8": "hybrid", "enable": False}, GPU, "but model.transformer_engine.enable is false; set fp8 to null"),
    ],
)
def test_what_it_is_asked_for_in_vain(
    installed: None, settings: dict[str, Any], device: torch.device, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        uses_transformer_engine(TransformerEngineConfig(**settings), device, SHAPE, exact=False)


@pytest.mark.parametrize("num_experts", [None, 4])
def test_its_layers_take_the_places_of_megatrons(num_experts):
    spec = get_gpt_layer_local_spec(num_experts=num_experts, moe_grouped_gemm=False, normalization="RMSNorm")
    use_transformer_engine(spec)
    layer = spec.submodules
    mlp = mlp_submodules(spec)[0]
    assert layer.input_layernorm is layer.pre_mlp_layernorm is te.TENorm
    assert layer.self_attention.submodules.linear_qkv is mlp.linear_fc1 is te.TEColumnParallelLinear
    assert layer.self_attention.submodules.linear_proj is mlp.linear_fc2 is te.TERowParallelLinear


@pytest.mark.parametrize(
    "shape, tp, fp8",
    [(QWEN2_5_1_5B, 1, ("linear_fc1", "linear_fc2")), (QWEN2_5_1_5B, 2, ("linear_fc1",)), (SHAPE, 1, ())],
)
def test_only_large_products_are_8_bit(
    caplog: pytest.LogCaptureFixture, shape: ModelShape, tp: int, fp8: tuple[str, ...]
) -> None:
    """At width 1,536 qkv and proj are slower in 8 bits; megatron's own layers have no 8-bit products."""
    caplog.set_level(logging.INFO)
    local = shards(shape, Layout(tuple(range(tp)), tp=tp))
    cfg, groups = TransformerEngineConfig(fp8="hybrid"), SimpleNamespace(role="actor")
    replaced = _replaced(cfg, local, groups, torch.bfloat16)
    assert replaced == fp8 and len(caplog.messages) == 1
    assert f"actor: fp8 products: {', '.join(fp8) or 'none'}; bfloat16 products: linear_qkv" in caplog.text

    spec = get_gpt_layer_local_spec(moe_grouped_gemm=False, normalization="RMSNorm")
    use_transformer_engine(spec, replaced)
    attention, mlp = spec.submodules.self_attention.submodules, mlp_submodules(spec)[0]
    assert (attention.linear_qkv, attention.linear_proj) == (ColumnParallelLinear, RowParallelLinear)
    assert mlp.linear_fc1 is (te.TEColumnParallelLinear if "linear_fc1" in fp8 else ColumnParallelLinear)
    assert mlp.linear_fc2 is (te.TERowParallelLinear if "linear_fc2" in fp8 else RowParallelLinear)


@pytest.mark.parametrize("dtype, warned", [(torch.float32, True), (torch.bfloat16, False)])
def test_float32_that_becomes_tf32_is_told(caplog: pytest.LogCaptureFixture, dtype: torch.dtype, warned: bool) -> None:
    groups = SimpleNamespace(role="actor")
    assert len(_replaced(TransformerEngineConfig(enable=True), shards(SHAPE), groups, dtype)) == 4
    assert ("actor: model.transformer_engine.enable=true computes float32 products in TF32" in caplog.text) is warned


def test_routers_do_not_multiply_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron would, if it is installed, whatever the config says."""
    monkeypatch.setattr(moe_utils, "te_general_gemm", object(), raising=False)
    megatron_versions.install()
    assert moe_utils.te_general_gemm is None


def test_a_model_with_8_bit_products_is_built_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of stand-ins, which compute as megatron's layers do: the names and the weights are the same."""

    class Column(ColumnParallelLinear): ...

    class Row(RowParallelLinear): ...

    for name, module in {"TEColumnParallelLinear": Column, "TERowParallelLinear": Row, "TENorm": RMSNorm}.items():
        monkeypatch.setattr(te, name, module)
    monkeypatch.setattr(build, "uses_transformer_engine", lambda cfg, *_, **options: cfg is not None)
    monkeypatch.setattr(params, "FP8_ELEMENTS", 64 * 80)  # between proj and all others
    with fake_rank(Layout((0,)), 0) as groups:
        settings = None, TransformerEngineConfig(fp8="e4m3")
        own, fp8 = (build.build_model(SHAPE, groups, te=cfg, device=CPU)[0] for cfg in settings)
    assert (own.config.fp8, fp8.config.fp8, fp8.config.fp8_recipe) == (None, "e4m3", "tensorwise")
    for layer in fp8.decoder.layers:
        attention, mlp = layer.self_attention, layer.mlp
        found = attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2
        assert [type(module) for module in found] == [Column, RowParallelLinear, Column, Row]
    weights = dict(own.named_parameters())
    assert weights.keys() == dict(fp8.named_parameters()).keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in fp8.named_parameters())
