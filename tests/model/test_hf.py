"""Hugging Face models in both worlds: the same logits, the same bits, and one line for a directory that is wrong."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hpcrl.model.build import paste_boxes
from hpcrl.model.exact import check_exact
from hpcrl.model.families.config_json import hf_config, read_shape, shape_from_hf
from hpcrl.model.hf_export import plan_files, write_beside
from hpcrl.model.hf_files import Safetensors, differing, hf_shards, open_weights, others_of, whole_tensors
from hpcrl.model.params import shards
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.engine import CacheLayout
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.engines.tensorrt_llm.declaration import check_model as check_tensorrt_llm
from hpcrl.rollout.protocol import Request, SamplingParams
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.layout import Layout
from tests.model.families import EXPERTS, LLAMA3, MODELS, SIZES, STATES, WINDOWS, YARN, make_model
from tests.model.vision_models import VISION_MODELS, vision_config


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "exact"),
    [
        *((name, False) for name in MODELS),
        *((name, True) for name in MODELS if name not in (*EXPERTS, *WINDOWS, *STATES)),
    ],
)
def test_the_engine_says_what_transformers_says(name: str, exact: bool, tmp_path: Path) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shape = read_shape(tmp_path)
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 128, "max_model_len": 240, "exact": exact}
    engine = NativeEngine(shape, None, 0, 1, torch.float32, **options)
    source = Safetensors(tmp_path)
    source.check(shape)
    source.load(shape, shards(shape), engine.weights())
    longest = 210 if name in STATES else 90  # more than three chunks of a recurrence
    prompts = [np.arange(length) % 47 for length in (1, 5, longest)]
    requests = [Request(prompt, str(number)) for number, prompt in enumerate(prompts)]
    completions = engine.generate(requests, SamplingParams(12), seed=0, step=0)
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)[range(12), completion.token_ids]
        np.testing.assert_allclose(completion.log_probs, expected, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", (*WINDOWS, *STATES))
@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 9}, {"num_sequences": 2}])
def test_windows_and_states_in_prompts_in_parts_in_groups_and_after_preemption(
    name: str, limits: dict[str, int], tmp_path: Path
) -> None:
    """Of 4 samples each; with room for 2 sequences of 7, most are preempted."""
    model = make_model(name)
    model.save_pretrained(tmp_path)
    shape, longest = read_shape(tmp_path), 48
    room = CacheLayout.of(shape, 1, longest)
    size = room.block_bytes(4) * 2 * limits.pop("num_sequences", 8) + 8 * room.sequence_bytes(4)
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "max_model_len": longest, **limits}
    engine = NativeEngine(shape, None, 0, 1, torch.float32, kv_cache_bytes=size, **options)
    source = Safetensors(tmp_path)
    source.load(shape, shards(shape), engine.weights())
    prompts = [np.arange(length) % 47 for length in (1, 7, 30)]  # of one token nothing is cached before decoding
    requests = [Request(prompts[number // 4], str(number // 4), number % 4) for number in range(12)]
    completions = engine.generate(requests, SamplingParams(18, ignore_eos=True), seed=0, step=0)
    for request, completion in zip(requests, completions, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1]
        expected = logits.log_softmax(-1)[range(18), completion.token_ids]
        np.testing.assert_allclose(completion.log_probs, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp_size", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_ranks_get_their_slices_and_together_they_are_the_files(name: str, tp_size: int, tmp_path: Path) -> None:
    make_model(name).save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    shape, theirs = read_shape(tmp_path), load_file(tmp_path / "model.safetensors")
    back = {its.local_name: torch.full(its.local_shape, torch.nan) for its in hf_shards(shape)}
    for tp_rank in range(tp_size):
        table = shards(shape, Layout(tuple(range(tp_size)), tp=tp_size), tp_rank)
        weights = {shard.name: torch.full(shard.local_shape, torch.nan) for shard in table}
        Safetensors(tmp_path).load(shape, table, weights)
        for shard in table:
            ours = torch.full(shard.global_shape, torch.nan)
            for box in shard.boxes:
                flat, local = ours.view(len(ours), -1), weights[shard.name].view(len(weights[shard.name]), -1)
                rows, cols = slice(*box.global_rows), slice(*box.global_cols)
                part = flat[rows, cols]
                part.copy_(
                    local[box.local_row : box.local_row + len(part), box.local_col : box.local_col + part.size(1)]
                )
            for its in (its for its in hf_shards(shape) if its.name == shard.name):
                out = back[its.local_name].view(its.local_shape[0], -1)
                for box in its.boxes:
                    part = ours.view(len(ours), -1)[slice(*box.global_rows)]
                    known = ~part.isnan()
                    out[box.local_row : box.local_row + len(part)][known] = part[known]
    for other in others_of(shape, theirs):
        theirs.pop(other)
    written = whole_tensors(back)
    assert written.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in written.items())


def packed(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Random weights of 4 bits for a tensor (experts, in, out), as blocks and scales; `weights` says their size."""
    experts, inner, outer = weights.shape
    size = experts, outer, inner // 32
    return torch.randint(0, 256, (*size, 16), dtype=torch.uint8), torch.randint(118, 126, size, dtype=torch.uint8)


def test_weights_of_4_bits_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    """Also of ranks that divide an expert inside a group of 32."""
    model = make_model("gpt-oss", intermediate_size=96, hidden_size=64)
    model.save_pretrained(tmp_path)
    tensors, expected = load_file(tmp_path / "model.safetensors"), {}
    torch.manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = packed(tensors.pop(name))
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    expected |= {name: tensor for name, tensor in tensors.items() if tensor.dtype != torch.uint8}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantised}))

    shape = read_shape(tmp_path)
    assert shape == shape_from_hf(config) and "quantization_config" not in hf_config(shape)
    source = open_weights(tmp_path, shape)
    for ranks in (1, 2):
        found: dict[str, torch.Tensor] = {}
        for rank in range(ranks):
            table = shards(shape, Layout(tuple(range(ranks)), tp=ranks, etp=ranks), rank)
            weights = {shard.name: torch.full(shard.local_shape, torch.nan) for shard in table}
            source.load(shape, table, weights)
            for shard in table:
                paste_boxes(weights[shard.name], found.setdefault(shard.name, torch.empty(shard.global_shape)), shard)
        back = {}
        for its in hf_shards(shape):
            out = torch.empty(its.local_shape)
            for box in its.boxes:
                height = box.global_rows[1] - box.global_rows[0]
                out[box.local_row : box.local_row + height] = found[its.name][slice(*box.global_rows)]
            back[its.local_name] = out
        whole = whole_tensors(back)
        assert whole.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in whole.items())
    exported = tmp_path / "exported"
    exported.mkdir()
    write_beside(exported, plan_files(shape, 2, 1), shape, 2, "bfloat16", tmp_path, None)
    assert read_shape(exported) == shape
    assert "quantization_config" not in json.loads((exported / "config.json").read_text())


def test_weights_of_4_bits_that_are_damaged_are_an_error(tmp_path: Path) -> None:
    make_model("gpt-oss").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    blocks, scales = packed(tensors.pop(name))
    for changed in ({f"{name}_blocks": blocks[:, :9]}, {f"{name}_scales": scales.float()}):
        damaged = {f"{name}_blocks": blocks, f"{name}_scales": scales, **changed}
        save_file(
            {**tensors, **{key: part.contiguous() for key, part in damaged.items()}}, tmp_path / "model.safetensors"
        )
        with pytest.raises(InputError, match=rf"{re.escape(name)}: blocks of .* and scales of .*; expected U8"):
            open_weights(tmp_path, read_shape(tmp_path))


@pytest.mark.parametrize("name", ["qwen3.5-moe", "qwen3-next"])
def test_experts_in_one_tensor_as_published(name: str, tmp_path: Path) -> None:
    """Qwen3.5's own files have all experts of a layer in two tensors, and `transformers` reads both forms."""
    model = make_model(name)
    model.save_pretrained(tmp_path / "each")
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    shape, found = read_shape(tmp_path / "each"), []
    for form in ("each", "stacked"):
        source = Safetensors(tmp_path / form)
        source.check(shape)
        weights = {shard.name: torch.full(shard.local_shape, torch.nan) for shard in shards(shape)}
        source.load(shape, shards(shape), weights)
        found.append(weights)
    assert any("gate_up_proj" in name for name in load_file(tmp_path / "stacked" / "model.safetensors"))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("name", MODELS)
def test_config_json_there_and_back(name: str) -> None:
    config = make_model(name).config.to_dict()
    shape = shape_from_hf(config)
    assert shape_from_hf(hf_config(shape)) == shape
    if shape.hf_keys:
        assert hf_config(shape) == json.loads(json.dumps(config))
        return
    old = {key: value for key, value in hf_config(shape).items() if key != "rope_parameters"}  # transformers 4
    assert shape_from_hf(old) == shape
    new = {key: value for key, value in hf_config(shape).items() if key not in ("rope_theta", "rope_scaling")}
    assert shape_from_hf(new) == shape


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gpt2"}, "model_type=gpt2; expected one of .*llama"),
        ({"model_type": "deepseek_v32"}, "model_type=deepseek_v32: DeepSeek sparse attention"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type=longrope; expected"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": None}}, "rope_type=llama3"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"model_type": "mixtral"}, "no 'num_local_experts'"),
        ({"model_type": []}, "model_type="),
        ({"hidden_size": "64"}, "hidden_size='64'; expected a positive whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5"),
        ({"rope_parameters": [1]}, "rope_parameters="),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one rotary embedding"),
        ({"rope_parameters": {**YARN, "factor": 0}}, "factor"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": "x"}}, "rope_type=llama3"),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 9}, "num_experts_per_tok=9 of 4"),
    ],
)
def test_what_our_model_does_not_compute_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        shape_from_hf({**SIZES, "model_type": "llama", "rms_norm_eps": 1e-5, **change})


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (
            "deepseek-v3",
            {"quantization_config": {"quant_method": "fp8"}},
            "quantised weights are not supported, so .* bfloat16",
        ),
        ("deepseek-v3", {"rope_interleave": False}, "rope_interleave=False; only True"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func=softmax; only sigmoid"),
        ("deepseek-v3", {"kv_lora_rank": None}, "no 'kv_lora_rank'"),
        ("deepseek-v3", {"topk_group": 5}, "topk_group=5 of n_group=4"),
        ("deepseek-v3", {"first_k_dense_replace": 5}, "first_k_dense_replace=5 of num_hidden_layers=5"),
        ("deepseek-v3", {"first_k_dense_replace": "1"}, "first_k_dense_replace='1'"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method=noaux_tc; expected greedy"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob=True; only False"),
        (
            "qwen3-next",
            {"layer_types": ["linear_attention"] * 4},
            "layer_types has 4 layers; expected num_hidden_layers=5",
        ),
        ("qwen3-next", {"layer_types": ["sliding_attention"] * 5}, "expected full_attention or linear_attention"),
        (
            "qwen3-next",
            {"linear_num_value_heads": 9},
            "linear_num_key_heads=4 does not divide linear_num_value_heads=9",
        ),
        ("qwen3.5", {"full_attention_interval": 0}, "full_attention_interval=0; expected a positive whole number"),
        ("qwen3.5", {"rope_parameters": {"partial_rotary_factor": 2, "rope_theta": 9.0}}, "partial_rotary_factor=2"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0; only None"),
        ("gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern=0; expected a positive whole number"),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": [1]}},
            "rope_parameters=.*; expected those of full_attention",
        ),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers=\[1\]; expected a list of num_hidden_layers=5"),
        ("minimax-m2", {"shared_intermediate_size": 8}, "shared_intermediate_size=8; only 0"),
        ("glm4-moe", {"quantization_config": {"quant_method": "fp8"}}, "quantised weights are not supported"),
        ("gpt-oss", {"swiglu_limit": 0}, "swiglu_limit=0; expected a positive number"),
    ],
)
def test_what_other_families_do_not_compute_is_refused(name: str, change: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        shape_from_hf({**hf_config(shape_from_hf(make_model(name).config.to_dict())), **change}, "some/config.json")
    assert str(caught.value).startswith("some/config.json")


@pytest.mark.parametrize("name", VISION_MODELS)
def test_what_a_tower_has_where_a_file_is_silent(name: str) -> None:
    config = vision_config(name, {}, {})
    defaults = json.loads(json.dumps(type(config.vision_config)().to_dict()))
    found = shape_from_hf(config.to_dict() | {"vision_config": {"in_chans": 3}}).vision.tower
    assert found.pop("in_chans") == 3  # Qwen2.5-VL's own files name in_channels so
    assert {key: defaults[key] for key in found} == found


def test_who_does_not_compute_latent_attention_says_so() -> None:
    shape = shape_from_hf(make_model("deepseek-v2-lite").config.to_dict())
    with pytest.raises(InputError, match=r"rollout.exact=true with latent attention \(layer 0\) is not supported"):
        check_exact(shape, 1, torch.float32, torch.device("cpu"))
    with pytest.raises(InputError, match="rollout.engine=tensorrt_llm: its layout of latent attention"):
        check_tensorrt_llm(shape, 1)


def test_who_does_not_compute_sinks_says_so() -> None:
    shape = shape_from_hf(make_model("gpt-oss").config.to_dict())
    with pytest.raises(InputError, match=r"rollout.exact=true with attention \(layer 0\) is not supported"):
        check_exact(shape, 1, torch.float32, torch.device("cpu"))
    with pytest.raises(InputError, match="rollout.engine=tensorrt_llm"):
        check_tensorrt_llm(shape, 1)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    model = make_model("deepseek-v3")
    shape = shape_from_hf(model.config.to_dict())
    expected = {its.local_name: its.local_shape for its in hf_shards(shape)}
    further = {"model.layers.5.eh_proj.weight": (32, 64), "model.layers.5.mlp.gate.weight": (12, 32)}
    assert not list(differing(shape, expected | further))
    assert list(differing(shape, expected | {"model.layers.5.mlp.gate.weight": (12, 32)}))

    source, target = tmp_path / "source", tmp_path / "target"
    model.save_pretrained(source)  # its config.json speaks of one such layer
    target.mkdir()
    write_beside(target, plan_files(shape, 4, 1), shape, 4, "float32", source, None)
    assert json.loads((target / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json"):
        read_shape(tmp_path)
    with pytest.raises(InputError, match="safetensors"):
        Safetensors(tmp_path)


def saved(folder: Path, change) -> tuple[ModelShape, Safetensors]:
    """A sharded Llama whose tensors `change(tensors)` has touched."""
    model = make_model("llama")
    tensors = model.state_dict()
    change(tensors)
    model.save_pretrained(folder, state_dict=tensors, max_shard_size="20KB")
    return read_shape(folder), Safetensors(folder)


def test_tensors_that_are_missing_too_many_or_of_another_shape_are_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    for number, (change, said) in enumerate(
        [
            (lambda tensors: tensors.pop(name), f"no tensor {name}"),
            (
                lambda tensors: tensors.update({name: torch.zeros(48, 31)}),
                rf"{name} has shape \(48, 31\); config.json says \(48, 32\)",
            ),
            (lambda tensors: tensors.update({"extra.weight": torch.zeros(2)}), "extra.weight is in the files but not"),
        ]
    ):
        folder = tmp_path / str(number)
        shape, source = saved(folder, change)
        with pytest.raises(InputError, match=said):
            source.check(shape)


@pytest.mark.parametrize("index", [[], {"weight_map": 3}, {"weight_map": {"a": 3}}, {"weight_map": {"a": "../x"}}])
def test_an_index_from_a_stranger(index: object, tmp_path: Path) -> None:
    shape, _ = saved(tmp_path, lambda tensors: None)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError) as caught:
        Safetensors(tmp_path).check(shape)
    assert "\n" not in str(caught.value)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    shape, _ = saved(tmp_path, lambda tensors: None)
    open_weights(tmp_path, shape)
    with pytest.raises(InputError, match="hidden_size is 32, expected 64"):
        open_weights(tmp_path, replace(shape, hidden_size=64))
    with pytest.raises(InputError, match="rope_theta is"):
        open_weights(tmp_path, replace(shape, rope_theta=7.0))


def test_a_truncated_shard_is_named_in_one_line(tmp_path: Path) -> None:
    shape, _ = saved(tmp_path, lambda tensors: None)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shard = tmp_path / index["weight_map"]["model.norm.weight"]
    whole_file = shard.read_bytes()
    for content in (whole_file[:-1], b"not safetensors", None):
        shard.unlink()
        if content is not None:
            shard.write_bytes(content)
        with pytest.raises(InputError, match=f"{shard.name}: .*; expected .* in it") as caught:
            Safetensors(tmp_path).check(shape)
        assert "\n" not in str(caught.value)


def test_a_model_in_the_hub_cache(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    shape, _ = saved(tmp_path / "own", lambda tensors: None)
    blobs, folder = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "1"
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    for number, path in enumerate((tmp_path / "own").iterdir()):
        path.rename(blobs / f"{number:x}")
        (folder / path.name).symlink_to(f"../../blobs/{number:x}")
    assert read_shape(folder) == shape
    open_weights(folder, shape)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to(path.parents[1] / "private")])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "shard"])
def test_a_pipe_or_a_link_in_place_of_a_file(name: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    shape, _ = saved(tmp_path / "theirs", lambda tensors: None)
    name = next((tmp_path / "theirs").glob("model-*")).name if name == "shard" else name
    path = tmp_path / "theirs" / name
    path.rename(tmp_path / "private")
    make(path)
    with pytest.raises(InputError, match=f"{name}: a (pipe|link that leads out of .*cp -L)") as caught:
        read_shape(tmp_path / "theirs")
        Safetensors(tmp_path / "theirs").check(shape)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"num_hidden_layers": 10**9}),
        ("llama", {"num_attention_heads": 2**30, "num_key_value_heads": 2**30}),
        ("qwen3-moe", {"num_experts": 2 * 10**9}),
        ("mixtral", {"num_local_experts": 9000, "num_hidden_layers": 1900}),
        ("deepseek-v3", {"first_k_dense_replace": 10**9}),
    ],
)
def test_numbers_that_would_take_for_ever(name: str, change: dict[str, int]) -> None:
    config = make_model(name).config.to_dict() | change
    with pytest.raises(InputError, match=rf"{next(iter(change))}={next(iter(change.values()))}|9000 experts in"):
        shape_from_hf(config)


def test_the_largest_published_models_are_below_the_bounds() -> None:
    """Layers and heads of Llama 3.1 405B, layers and experts of Qwen3."""
    config = make_model("llama").config.to_dict()
    heads = {"num_attention_heads": 128, "num_key_value_heads": 8, "hidden_size": 16384, "num_hidden_layers": 126}
    assert shape_from_hf(config | heads | {"head_dim": 128}).num_layers == 126
    config = make_model("qwen3-moe").config.to_dict()
    assert shape_from_hf(config | {"num_local_experts": 512, "num_hidden_layers": 94}).num_experts == 512


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, '{"num_hidden_layers": 1' + "0" * 5000 + "}"])
def test_a_config_that_is_nested_or_long_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match="config.json cannot be read") as caught:
        read_shape(tmp_path)
    assert "\n" not in str(caught.value)
