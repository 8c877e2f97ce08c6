"""Directories of vision-language models: config.json there and back, experts in one tensor, the engine's log-probs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hpcrl.model.families.config_json import hf_config, read_shape, shape_from_hf
from hpcrl.model.hf_export import plan_files
from hpcrl.model.hf_files import Safetensors, whole_tensors
from hpcrl.model.params import check_adapters, shards
from hpcrl.model.shape import ATTENTION_PROJECTIONS, Lora
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.protocol import PromptPicture, Request, SamplingParams
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.layout import Layout
from tests.model.vision_models import (
    IMAGE,
    VISION_MODELS,
    make_samples,
    make_vision_batch,
    make_vision_model,
    save_vision_model,
    their_log_probs,
)
from tests.rollout.turns import Turns
from tests.strict_device.load import load


@pytest.mark.parametrize("name", VISION_MODELS)
def test_config_json_there_and_back(name: str) -> None:
    config = make_vision_model(name, num_hidden_layers=2).config.to_dict()
    shape = shape_from_hf(config)
    assert not shape.tie_word_embeddings
    assert shape_from_hf(config | {"tie_word_embeddings": True}).tie_word_embeddings
    assert shape_from_hf(hf_config(shape)) == shape


def test_experts_in_one_tensor_are_read_in_both_layouts_and_written_in_the_published_one(tmp_path: Path) -> None:
    """`transformers` 5 saves each expert's matrices as it computes with them; published files have them transposed."""
    model = make_vision_model("qwen3-vl-moe", num_hidden_layers=2, mlp_only_layers=[])
    save_vision_model(model, tmp_path / "published")
    model.save_pretrained(tmp_path / "as_computed")
    shape = read_shape(tmp_path / "published")
    published = load_file(tmp_path / "published" / "model.safetensors")
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert published[name].shape == (8, 64, 32)
    assert load_file(tmp_path / "as_computed" / "model.safetensors")[name].shape == (8, 32, 64)
    read = type(model).from_pretrained(tmp_path / "published")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), read.parameters(), strict=True))

    layout = Layout((0, 1), tp=2, ep=2)
    for rank in (0, 1):
        table, found = shards(shape, layout, rank), []
        for folder in ("published", "as_computed"):
            found.append({shard.name: torch.full(shard.local_shape, torch.nan) for shard in table})
            source = Safetensors(tmp_path / folder)
            source.check(shape)
            source.load(shape, table, found[-1])
        assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())

    weights = {shard.name: torch.empty(shard.local_shape) for shard in shards(shape)}
    Safetensors(tmp_path / "as_computed").load(shape, shards(shape), weights)
    for file in plan_files(shape, 4, num_writers=3):
        parts = {shard.local_name: weights[shard.name] for shard in file.shards if "mlp.experts." in shard.local_name}
        written = whole_tensors(parts)
        assert all(torch.equal(tensor, published[name]) for name, tensor in written.items())
        assert len(parts) == shape.num_experts * len(written)


def test_what_experts_in_one_tensor_do_not_allow_is_an_error() -> None:
    config = hf_config(shape := shape_from_hf(make_vision_model("qwen3-vl-moe").config.to_dict()))
    for width in (64, 32):
        text = config["text_config"] | {"moe_intermediate_size": width}
        with pytest.raises(InputError, match=f"moe_intermediate_size={width} is hidden_size=64 or half of it"):
            shape_from_hf(config | {"text_config": text})
    with pytest.raises(InputError, match="norm_topk_prob=False; only True"):
        shape_from_hf(config | {"text_config": config["text_config"] | {"norm_topk_prob": False}})
    check_adapters(shape, Layout((0,)), Lora(2, 4.0, ATTENTION_PROJECTIONS))
    with pytest.raises(InputError, match=r"target_modules=down_proj,gate_proj,up_proj: .*; use only q_proj, k_proj"):
        check_adapters(shape, Layout((0,)), Lora(2, 4.0))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", VISION_MODELS)
def test_decoding_equals_prefill_and_both_equal_transformers(name: str, tmp_path: Path) -> None:
    """Responses that go on from any of their tokens, which are prefilled with the prompt and its pictures then; on the
    CPU, and on a device, where decoding is another."""
    theirs = make_vision_model(name)
    with torch.no_grad():  # a drawn placeholder is a token here, and an error there
        theirs.lm_head.weight[IMAGE:] = 0.0
    save_vision_model(theirs, tmp_path)
    shape, samples, column = read_shape(tmp_path), make_samples(theirs), make_vision_batch(theirs).pictures
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 160}
    engine = NativeEngine(shape, None, 0, 1, torch.float32, enable_prefix_caching=False, **options)
    Safetensors(tmp_path).load(shape, shards(shape), engine.weights())
    patches = [row.reshape(-1, shape.vision.patch_width) for row in map(column.values.row, range(len(column.keys)))]
    features = engine.encode(column.grids, lambda numbers: [patches[number] for number in numbers])
    requests = []
    for row, sample in enumerate(samples):
        pictures = [PromptPicture(int(column.keys[it]), picture, features[it]) for it, picture in column.of_row(row)]
        requests.append(Request(sample.ids[: -sample.num_response], str(row), pictures=tuple(pictures)))

    sampling = SamplingParams(9, temperature=0.0, ignore_eos=True)
    decoded = engine.generate(requests, sampling, seed=0, step=0)
    for request, sample, done in zip(requests, samples, decoded, strict=True):
        whole = sample._replace(ids=[*request.prompt_ids, *done.token_ids.tolist()], num_response=9)
        with torch.no_grad():
            np.testing.assert_allclose(done.log_probs, their_log_probs(theirs, whole), rtol=0, atol=1e-4)
    elsewhere = NativeEngine(shape, None, 0, 1, torch.float32, **options, device=load())
    Safetensors(tmp_path).load(shape, shards(shape), elsewhere.weights())
    for found, done in zip(elsewhere.generate(requests, sampling, seed=0, step=0), decoded, strict=True):
        assert found.token_ids.tolist() == done.token_ids.tolist()
        np.testing.assert_allclose(found.log_probs, done.log_probs, rtol=0, atol=1e-5)
    caching = NativeEngine(shape, None, 0, 1, torch.float32, **options)
    Safetensors(tmp_path).load(shape, shards(shape), caching.weights())
    longer = replace(sampling, max_new_tokens=40)
    turns = (Turns(requests, num_turns=3, limit=4).run(each, longer) for each in (engine, caching))
    for plain, found in zip(*turns, strict=True):
        assert found.token_ids.tolist() == plain.token_ids.tolist()
        np.testing.assert_allclose(found.log_probs, plain.log_probs, rtol=0, atol=1e-5)
        assert found.prefill.reused > 0 and plain.prefill.reused == 0
    for first in (1, 4, 8):
        parts = [replace(it, prefix_ids=done.token_ids[:first]) for it, done in zip(requests, decoded, strict=True)]
        for part, done in zip(engine.generate(parts, sampling, seed=0, step=0), decoded, strict=True):
            assert part.token_ids.tolist() == done.token_ids[first:].tolist()
            np.testing.assert_allclose(part.log_probs, done.log_probs[first:], rtol=0, atol=1e-5)
