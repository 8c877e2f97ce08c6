"""The shape that a job template gives, and initial weights as a function of (seed, name)."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
import transformers

from hpcrl.config.schema import ModelConfig, RopeScalingConfig
from hpcrl.model.architecture import shape_from_yaml, shape_of
from hpcrl.model.build import initial_weight
from hpcrl.model.families.config_json import hf_config, shape_from_hf
from hpcrl.runtime.exits import InputError
from tests.model.families import MODELS, SIZES, WINDOWS, make_model

EXPERTS: dict[str, Any] = {"family": "qwen3_moe", "num_experts": 4, "moe_ffn_hidden_size": 64}


def test_shape_takes_tokenizer_vocabulary_and_derives_head_dim():
    shape = shape_from_yaml(ModelConfig(hidden_size=128, num_attention_heads=4), vocab_size=100)
    assert (shape.vocab_size, shape.padded_vocab_size, shape.head_dim) == (100, 128, 32)
    assert shape_from_yaml(ModelConfig(vocab_size=128), vocab_size=100).padded_vocab_size == 128


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ModelConfig(hidden_size=100, num_attention_heads=8), "does not divide model.hidden_size"),
        (ModelConfig(num_attention_heads=4, num_query_groups=3), "does not divide model.num_attention_heads"),
        (ModelConfig(vocab_size=50), "below the tokenizer's"),
        (ModelConfig(head_dim=31), "odd"),
        (ModelConfig(num_experts=4), "family=llama with model.num_experts=4; qwen3_moe and mixtral have experts"),
        (ModelConfig(family="mixtral"), "family=mixtral with model.num_experts=0"),
        (ModelConfig(**EXPERTS, moe_topk=5), "moe_topk=5 is more than model.num_experts=4"),
        (ModelConfig(**EXPERTS, dense_layers=[2]), r"dense_layers=\[2\]: model.num_layers=2"),
        (ModelConfig(**{**EXPERTS, "family": "mixtral"}), "family=mixtral has moe_ffn_hidden_size=320, not 64"),
        (ModelConfig(rope_scaling=RopeScalingConfig(rope_type="llama3", factor=8.0)), "lacks a number: 'low_freq"),
    ],
)
def test_impossible_shapes_are_refused(config, words):
    with pytest.raises(InputError, match=words):
        shape_from_yaml(config, vocab_size=100)


NAMED = get_args(ModelConfig.model_fields["family"].annotation)
IN_YAML = [name for name, (kind, _) in MODELS.items() if kind in NAMED and name not in WINDOWS]


def test_any_architecture_is_given_by_the_keys_of_its_config_json() -> None:
    theirs = make_model("apertus").config.to_dict()
    assert shape_from_yaml(ModelConfig(hf_config=theirs), vocab_size=40) == shape_from_hf(theirs)
    with pytest.raises(InputError, match="model.hf_config.vocab_size=50 is below the tokenizer's 51; raise it"):
        shape_from_yaml(ModelConfig(hf_config=theirs), vocab_size=51)
    with pytest.raises(InputError, match="model.hf_config: model_type=gpt2; expected one of"):
        shape_from_yaml(ModelConfig(hf_config={"model_type": "gpt2"}), vocab_size=51)
    with pytest.raises(InputError, match="model.path=x and model.hf_config describe a model each"):
        shape_of(ModelConfig(path="x", hf_config=theirs), 0)


@pytest.mark.parametrize("name", IN_YAML)
def test_an_architecture_in_yaml_is_that_of_config_json(name: str) -> None:
    """In each family, by the names that the job template has for the keys of config.json."""
    model_type, options = MODELS[name]
    theirs = transformers.AutoConfig.for_model(model_type, **{**SIZES, **options}).to_dict()
    expected = shape_from_hf(theirs)
    rope = {"rope_type": "default", **theirs["rope_parameters"]}
    theta = rope.pop("rope_theta")
    names = {
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "ffn_hidden_size": "intermediate_size",
        "num_attention_heads": "num_attention_heads",
        "num_query_groups": "num_key_value_heads",
        "head_dim": "head_dim",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_position_embeddings",
        "rms_norm_eps": "rms_norm_eps",
        "init_std": "initializer_range",
        "tie_word_embeddings": "tie_word_embeddings",
        "moe_ffn_hidden_size": "moe_intermediate_size",
        "moe_topk": "num_experts_per_tok",
        "moe_norm_topk_prob": "norm_topk_prob",
        "dense_layers": "mlp_only_layers",
    }
    keys = {ours: theirs[key] for ours, key in names.items() if key in theirs}
    keys["num_experts"] = theirs.get("num_experts", theirs.get("num_local_experts", 0))
    if rope["rope_type"] != "default":
        keys["rope_scaling"] = RopeScalingConfig(**rope)
    found = shape_from_yaml(ModelConfig(family=model_type, rope_theta=theta, **keys), vocab_size=10)
    assert found == expected
    assert shape_from_hf(hf_config(found)) == found


def test_initial_weights_depend_on_seed_and_name_alone():
    shape = shape_from_yaml(ModelConfig(init_std=0.1, num_layers=2), vocab_size=100)
    draw = lambda name, seed: initial_weight(shape, name, (256, 128), seed)  # noqa: E731
    fc1, proj = "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.self_attention.linear_proj.weight"
    assert torch.equal(draw(fc1, 1), draw(fc1, 1))
    assert not torch.equal(draw(fc1, 1), draw(fc1, 2))
    assert not torch.equal(draw(fc1, 1), draw(fc1.replace("0", "1"), 1))
    assert draw(fc1, 1).std() == pytest.approx(0.1, rel=0.02)
    assert draw(proj, 1).std() == pytest.approx(0.1 / 2, rel=0.02)
    assert torch.equal(initial_weight(shape, "decoder.final_layernorm.weight", (128,), 0), torch.ones(128))
    assert not initial_weight(shape, "value_head.weight", (1, 128), 0).any()
