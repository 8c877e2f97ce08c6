"""Llama's weights in both worlds: the same logits, and the way back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from hpcrl.launch.exits import InputError
from hpcrl.model.hf.directory import Safetensors, load_weights, read_shape
from hpcrl.model.hf.llama import from_hf, hf_config, shape_from_hf, to_hf
from hpcrl.model.params import shards
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.native.engine import NativeEngine
from hpcrl.rollout.protocol import Request, SamplingParams


def make_shape(tied: bool) -> ModelShape:
    return ModelShape(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=8,
        num_query_groups=2,
        head_dim=8,
        vocab_size=50,
        rope_theta=5000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
    )


def make_llama(shape: ModelShape) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**hf_config(shape))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_the_engine_says_what_transformers_says(tied: bool, sharded: bool, tmp_path: Path) -> None:
    shape = make_shape(tied)
    model = make_llama(shape)
    model.save_pretrained(tmp_path, **({"max_shard_size": "20KB"} if sharded else {}))
    assert (tmp_path / "model.safetensors").exists() != sharded
    assert read_shape(tmp_path) == shape
    engine = NativeEngine(shape, None, 0, 1, torch.float32, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=40)
    load_weights(shape, Safetensors(tmp_path), engine.weights())
    prompts = [np.arange(3, 3 + length) for length in (1, 5, 17)]
    requests = [Request(prompt, str(number)) for number, prompt in enumerate(prompts)]
    completions = engine.generate(requests, SamplingParams(12), seed=0, step=0)
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)[range(12), completion.token_ids]
        np.testing.assert_allclose(completion.log_probs, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_there_and_back(tied: bool) -> None:
    shape = make_shape(tied)
    theirs = make_llama(shape).state_dict()
    ours = dict(from_hf(shape, theirs.__getitem__))
    whole = {s.name: s.global_shape for s in shards(shape, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)}
    assert {name: tuple(tensor.shape) for name, tensor in ours.items()} == whole
    back = dict(to_hf(shape, ours.__getitem__))
    assert back.keys() == theirs.keys() - ({"lm_head.weight"} if tied else set())
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in back.items())


def test_ranks_get_their_slices() -> None:
    shape = make_shape(False)
    theirs = make_llama(shape).state_dict()
    ours = dict(from_hf(shape, theirs.__getitem__))
    for tp_rank in range(2):
        table = shards(shape, tp_rank=tp_rank, tp_size=2, pp_rank=0, pp_size=1)
        weights = {shard.name: torch.full(shard.local_shape, torch.nan) for shard in table}
        load_weights(shape, theirs.__getitem__, weights, tp_rank=tp_rank, tp_size=2)
        gate, up = ours["decoder.layers.0.mlp.linear_fc1.weight"].chunk(2)
        mine = slice(tp_rank * 24, tp_rank * 24 + 24)
        assert torch.equal(weights["decoder.layers.0.mlp.linear_fc1.weight"], torch.cat([gate[mine], up[mine]]))
        assert all(weight.isfinite().all() for weight in weights.values())


def test_configs_of_both_versions_are_read() -> None:
    shape = make_shape(False)
    config = hf_config(shape)
    assert shape_from_hf(config) == shape
    for old, new in (("rope_parameters", None), ("rope_theta", None)):
        assert shape_from_hf({key: value for key, value in config.items() if key != old}) == shape, new


@pytest.mark.parametrize(
    "change",
    [{"model_type": "mixtral"}, {"attention_bias": True}, {"rope_parameters": {"rope_type": "yarn"}}],
)
def test_what_our_model_does_not_compute_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(change)) if "rope_parameters" not in change else "rope_type"):
        shape_from_hf({**hf_config(make_shape(False)), **change})


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json"):
        read_shape(tmp_path)
    with pytest.raises(InputError, match="safetensors"):
        Safetensors(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match="has no 'num_attention_heads'"):
        read_shape(tmp_path)


@pytest.mark.parametrize("content", [None, b"not safetensors"])
def test_a_shard_that_is_missing_or_damaged_is_refused_in_one_line(content: bytes | None, tmp_path: Path) -> None:
    name, shard = "model.norm.weight", "model-00001-of-00001.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: shard}}))
    if content is not None:
        (tmp_path / shard).write_bytes(content)
    read = Safetensors(tmp_path)
    with pytest.raises(InputError, match=f"{shard}: .*; expected {name} in it") as caught:
        read(name)
    assert "\n" not in str(caught.value)
