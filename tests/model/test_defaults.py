"""Keys that are absent from config.json, or null: what `transformers` makes of them, or one line that names the key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hpcrl.config.schema import Config
from hpcrl.model.architecture import check_longest
from hpcrl.model.families.config_json import DEFAULTS, FAMILIES, read_shape, shape_from_hf
from hpcrl.model.hf_files import Safetensors, open_weights
from hpcrl.model.params import shards
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.protocol import Request, SamplingParams
from hpcrl.runtime.exits import InputError

Keys = dict[str, Any]
IS_4 = transformers.__version__.startswith("4.")

# Without these keys a file does not say which tensors it describes.
SIZES = {
    "num_hidden_layers": 5,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "vocab_size": 50,
}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
EXPERTS: dict[str, Keys] = {
    "mixtral": {"num_local_experts": 4},
    **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe"), {"num_experts": 16, "moe_intermediate_size": 12}),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "kimi_k2"), {**LATENT, "n_routed_experts": 16, "moe_intermediate_size": 12}
    ),
    "glm4_moe": {"n_routed_experts": 16, "moe_intermediate_size": 12},
    **dict.fromkeys(("minimax_m2", "gpt_oss"), {"num_local_experts": 16}),
    "nemotron_h": {"n_routed_experts": 16, "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 24},
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe"), {"num_experts": 16}),
}
# transformers 4.57 and 5 have different defaults of rope_theta, and with its own ones DeepSeek-V2 fails there.
REQUIRED: dict[str, Keys] = {
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), {"rope_theta": 77.0}),
    "deepseek_v2": {"num_experts_per_tok": 3, "n_group": 4, "topk_group": 2},
    "nemotron_h": {  # its class counts the layers of the list
        "num_hidden_layers": None,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 6,
        "n_groups": 4,
        "ssm_state_size": 10,
    },
}
# Other values than the defaults.
OTHERS: Keys = (
    {"num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 512, "rope_theta": 77.0}
    | {"rms_norm_eps": 1e-4, "initializer_range": 0.1, "tie_word_embeddings": True}
    | {"use_sliding_window": True, "sliding_window": 99, "max_window_layers": 2, "layer_types": None}
    | {"decoder_sparse_step": 2, "mlp_only_layers": [1], "norm_topk_prob": True, "num_experts_per_tok": 3}
    | {"q_lora_rank": 24, "first_k_dense_replace": 1, "n_shared_experts": 3, "routed_scaling_factor": 3.0}
    | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    | {"use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.75, "rotary_dim": 8}
    | {"no_rope_layers": [1, 0, 1, 0, 0], "no_rope_layer_interval": 2}
    | {"full_attention_interval": 2, "linear_conv_kernel_dim": 3, "moe_intermediate_size": 12}
    | {"linear_key_head_dim": 6, "linear_value_head_dim": 10, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"shared_expert_intermediate_size": 20, "swiglu_alpha": 1.5, "swiglu_limit": 5.0}
    | {"rope_local_base_freq": 55.0, "query_pre_attn_scalar": 20, "sliding_window_pattern": 2}
    | {"layer_norm_epsilon": 1e-4, "conv_kernel": 3, "use_conv_bias": False, "time_step_min": 0.4}
)
# Of models whose config class in transformers has another model_type.
CLASSES = {"kimi_k2": "deepseek_v3"}
ROPE = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, "original_max_position_embeddings": 64}
TOWER: dict[str, Keys] = {
    "qwen2_5_vl": {"window_size": 8, "fullatt_block_indexes": [1], "tokens_per_second": 2},
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), {"num_position_embeddings": 16}),
}
TOWER_SIZES = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 2,
    "spatial_merge_size": 4,
    "temporal_patch_size": 3,
    "out_hidden_size": 32,
}
TOKENS = {f"{name}_token_id": 46 + i for i, name in enumerate(("image", "video", "vision_start", "vision_end"))}


def sizes(family: str) -> Keys:
    found = {**SIZES, **EXPERTS.get(family, {}), **REQUIRED.get(family, {})}
    return {key: size for key, size in found.items() if size is not None}


def file(family: str, text: Keys, tower: Keys, top: Keys) -> Keys:
    """config.json with these sections."""
    sections = {"text_config": text, "vision_config": tower} if family in TOWER else text
    return {"model_type": family, **top, **sections}


def parts(family: str) -> tuple[Keys, Keys, Keys]:
    """The sections of a file that has every key, none with its default."""
    own = {**OTHERS, **FAMILIES[family].fixed, **({"attention_bias": False} if family == "seed_oss" else {})}
    text = sizes(family) | {key: own[key] for key in [*DEFAULTS[family], *FAMILIES[family].fixed] if key in own}
    if family not in TOWER:
        return {**text, "rope_scaling": ROPE}, {}, {}
    tied = {"tie_word_embeddings": text.pop("tie_word_embeddings")}
    rope = {"rope_type": "default", "mrope_section": [3, 2, 1] if family.startswith("qwen3_5") else [4, 2, 2]}
    return {**text, "rope_scaling": rope}, {**TOWER_SIZES, **TOWER[family]}, {**TOKENS, **tied}


def with_one_changed(section: Keys, value: Any) -> Iterator[tuple[str, Keys]]:
    """The section without one of its keys, for each of them; or with `value` in its place."""
    for key, found in section.items():
        rest = {name: other for name, other in section.items() if name != key}
        yield key, rest if value is Ellipsis else {**rest, key: value}
        if isinstance(found, dict):
            yield from ((inner, {**section, key: part}) for inner, part in with_one_changed(found, value))


def files(family: str, value: Any = ...) -> Iterator[tuple[str, Keys]]:
    text, tower, top = parts(family)
    yield from ((key, file(family, part, tower, top)) for key, part in with_one_changed(text, value))
    yield from ((f"tower.{key}", file(family, text, part, top)) for key, part in with_one_changed(tower, value))
    yield from ((key, file(family, text, tower, part)) for key, part in with_one_changed(top, value))


def completed(config: Keys) -> Keys:
    """The file with every default of transformers."""
    config = json.loads(json.dumps(config))
    return dict(json.loads(json.dumps(config_class(config.pop("model_type"))(**config).to_dict())))


def config_class(family: str) -> Any:
    return CONFIG_MAPPING[CLASSES.get(family, family)]


def described(config: Keys) -> Keys:
    """The fields of the shape, and of the tower those that the model has."""
    shape = shape_from_hf(config)
    found = {each.name: getattr(shape, each.name) for each in fields(shape) if each.compare}
    found["family"] = CLASSES.get(shape.family, shape.family)
    if shape.vision is not None:
        found |= {each.name: getattr(shape.vision, each.name) for each in fields(shape.vision)}
        found["config"] = {key: shape.vision.tower[key] for key in {**TOWER_SIZES, **TOWER[shape.family]}}
        found.pop("vision")
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_an_absent_key_has_the_default_of_transformers(family: str) -> None:
    seen, required = set(), sizes(family)
    for key, config in files(family):
        seen.add(key)
        if (key, family) == ("tie_word_embeddings", "qwen2_5_vl") and IS_4:
            continue  # the class says true, and the model reads its section for text
        if key in required and key not in DEFAULTS[family]:
            with pytest.raises(InputError, match=rf"^config\.json has no '{key}'; expected"):
                shape_from_hf(config)
            continue
        try:
            expected = described(completed(config))
        except KeyError:  # transformers needs it: a number of a scaled rotary embedding
            assert key in ROPE
        except InputError as error:  # a default that does not go with the other keys
            with pytest.raises(InputError) as caught:
                shape_from_hf(config)
            assert str(caught.value) == str(error)
        else:
            assert described(config) == expected, key
    assert seen >= {*DEFAULTS[family], *FAMILIES[family].fixed} - {"layer_types", "rope_parameters"}


# Of training from scratch, of libraries, of tokenizers, and derived from others.
WITHOUT_MEANING = {
    *("attention_dropout", "residual_dropout", "router_aux_loss_coef", "router_jitter_noise", "output_router_logits"),
    *("use_cache", "pretraining_tp", "bos_token_id", "eos_token_id", "pad_token_id", "qk_head_dim"),
    *("_sliding_window_pattern", "num_nextn_predict_layers"),
    # of Nemotron-H, which the library's model does not read either, except to draw weights
    *("time_step_limit", "time_step_max", "time_step_floor", "rescale_prenorm_residual", "hidden_dropout", "expand"),
    *("chunk_size", "mamba_ssm_cache_dtype", "use_mamba_kernels", "mtp_layers_block_type", "num_logits_to_keep"),
    *("n_shared_experts", "moe_shared_expert_overlap"),
}


@pytest.mark.skipif(IS_4, reason="its classes have other keys")
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in TOWER])
def test_every_key_that_changes_numbers_is_read(family: str) -> None:
    """A key of the class in `transformers` that is new there has to be read, or to have one value."""
    known = {
        *DEFAULTS[family],
        *FAMILIES[family].fixed,
        *sizes(family),
        "rope_parameters",
        "num_local_experts",
        *WITHOUT_MEANING,
    }
    if family == "exaone4":
        known |= {"layer_types", "sliding_window_pattern"}  # of layers with windows, which are an error
    keys = config_class(family)(**({"pad_token_id": 1} if family == "smollm3" else {})).to_dict()
    assert keys.keys() - transformers.PretrainedConfig().to_dict().keys() <= known


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_is_null_is_absent_or_has_the_meaning_that_null_has_there(family: str) -> None:
    meant = {"num_key_value_heads": 8, "head_dim": 4, "n_shared_experts": 0}
    for (key, absent), (_, null) in zip(files(family), files(family, None), strict=True):
        if key == "sliding_window":
            assert not shape_from_hf(null).windows
        elif key == "q_lora_rank":
            assert shape_from_hf(null).mla.q_lora_rank is None
        elif key in meant:
            text, tower, top = parts(family)
            assert outcome(null) == outcome(file(family, {**text, key: meant[key]}, tower, top))
        else:
            assert outcome(null) == outcome(absent), key


def outcome(config: Keys) -> Keys | str:
    try:
        return described(config)
    except InputError as error:
        return str(error)


# Sizes with which the defaults work, and what they leave out.
SMALL: dict[str, Keys] = {
    **dict.fromkeys(("qwen2", "qwen3"), {"num_key_value_heads": 4}),
    "qwen2_5_vl": {"hidden_size": 1024},
    "qwen3_vl": {"num_key_value_heads": 4},
    "qwen3_vl_moe": {"num_key_value_heads": 4, "head_dim": 128},
    "deepseek_v2": {"q_lora_rank": 24},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 5, "num_key_value_heads": 4},
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), {"q_lora_rank": 24, "num_key_value_heads": 8}),
    **dict.fromkeys(("seed_oss", "glm4_moe", "minimax_m2"), {"num_key_value_heads": 4}),
    "ministral": {"num_key_value_heads": 4, "head_dim": 4},
    "smollm3": {"pad_token_id": 1},
}


def write_small(family: str, folder: Path, **keys: Any) -> transformers.PreTrainedModel:
    """A random model whose config.json has the sizes of its tensors, and `keys`."""
    text = {**sizes(family), **SMALL.get(family, {}), **keys}
    config = file(family, text, {**TOWER_SIZES, "out_hidden_size": text["hidden_size"], **TOWER.get(family, {})}, {})
    kept = json.loads(json.dumps(config))
    torch.manual_seed(0)
    model = getattr(transformers, FAMILIES[family].architecture)(config_class(config.pop("model_type"))(**config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * (32 / text["hidden_size"]) ** 0.5 * torch.randn_like(parameter))
    model.eval().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(kept))
    return model


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_of_a_file_without_these_keys_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    if family in TOWER and IS_4:
        pytest.skip("transformers 4 needs rope_scaling there")
    model = write_small(family, tmp_path)
    shape, ids = read_shape(tmp_path), np.arange(90) % 41
    engine = NativeEngine(shape, None, 0, 1, torch.float32, max_num_seqs=1, max_num_batched_tokens=96, max_model_len=96)
    source = Safetensors(tmp_path)
    source.check(shape)
    source.load(shape, shards(shape), engine.weights())
    (found,) = engine.generate([Request(ids, "0")], SamplingParams(6), seed=0, step=0)
    with torch.no_grad():
        logits = model(torch.tensor([[*ids, *found.token_ids]])).logits[0, len(ids) - 1 : -1]
    expected = logits.log_softmax(-1)[range(6), found.token_ids]
    np.testing.assert_allclose(found.log_probs, expected, rtol=0, atol=1e-4)


WINDOWS: list[tuple[str, Keys, int | None]] = [
    ("mistral", {}, 4096),
    ("mistral", {"sliding_window": None}, None),
    ("mistral", {"sliding_window": 64, "layer_types": ["full_attention"] * 5}, 64),
    ("mixtral", {}, None),
    ("mixtral", {"sliding_window": 64}, 64),
    ("llama", {"sliding_window": 64}, None),  # which transformers does not read
    ("qwen2", {"sliding_window": 64}, None),
    ("qwen2", {"sliding_window": 64, "use_sliding_window": True}, None),  # from layer 28 on
    ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 4}, 64),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, 4096),
    ("qwen3", {"sliding_window": 64, "use_sliding_window": True, "layer_types": ["full_attention"] * 5}, None),
    ("qwen3", {"use_sliding_window": True, "layer_types": ["sliding_attention", *["full_attention"] * 4]}, 4096),
    ("qwen3_moe", {"sliding_window": 64}, None),
    ("qwen3_moe", {"sliding_window": 64, "use_sliding_window": True}, 64),
]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("family", "keys", "window"), WINDOWS)
def test_a_window_is_that_of_transformers(family: str, keys: Keys, window: int | None, tmp_path: Path) -> None:
    """Its attention of 96 tokens differs from full attention exactly where the model has a shorter window."""
    model = write_small(family, tmp_path, **keys, **SMALL.get(family, {}))
    assert max(filter(None, read_shape(tmp_path).windows), default=None) == window
    full = type(model)(CONFIG_MAPPING[family](**sizes(family), **SMALL.get(family, {}), sliding_window=None)).eval()
    full.load_state_dict(model.state_dict())
    ids = torch.arange(96)[None] % 41
    with torch.no_grad():
        differs = (model(ids).logits - full(ids).logits).abs().amax((0, 2)) > 1e-4
    first = 96 if window is None else window
    assert not differs[:first].any()
    assert differs[first:].any() == (first < 96)


def test_weights_with_another_window_are_an_error(tmp_path: Path) -> None:
    write_small("mistral", tmp_path, sliding_window=64)
    found = read_shape(tmp_path)
    open_weights(tmp_path, found)
    open_weights(tmp_path, replace(found, windows=(), max_position_embeddings=64))
    with pytest.raises(InputError, match=r"config\.json: attention in layer 0 sees 64 tokens, and 65 in the model"):
        open_weights(tmp_path, replace(found, windows=(), max_position_embeddings=65))


def test_sequences_that_pass_the_context_are_an_error() -> None:
    shape = shape_from_hf({"model_type": "mistral", **SIZES, "max_position_embeddings": 8192})

    def check(prompt: int, response: int) -> None:
        lengths = {"max_prompt_length": prompt, "max_response_length": response}
        check_longest(shape, Config.model_validate({"data": lengths}), "model")

    check(4096, 4096)
    with pytest.raises(InputError, match="= 8193 exceeds the 8192 tokens that the model of model supports"):
        check(4096, 4097)


def test_layer_types_that_are_not_computed_are_an_error() -> None:
    for types in (["chunked_attention"], "full_attention", [3]):
        with pytest.raises(InputError, match="layer_types=.*; expected full_attention or sliding_attention"):
            shape_from_hf({"model_type": "qwen2", **sizes("qwen2"), **SMALL["qwen2"], "layer_types": types})


def test_the_keys_of_transformers_4_have_priority_as_in_transformers_5() -> None:
    both = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 5.0}}
    config = {"model_type": "mistral", **SIZES, **both, "rope_theta": 7.0}
    assert described(config) == described(completed(config))
    assert shape_from_hf(config).rope_theta == 7.0
    with pytest.raises(InputError, match="partial_rotary_factor=0.5"):
        shape_from_hf({"model_type": "llama", **SIZES, "partial_rotary_factor": 0.5})
    with pytest.raises(InputError, match="rope_type=linear lacks a number: 'factor'"):
        shape_from_hf({"model_type": "llama", **SIZES, "rope_scaling": {"type": "linear"}})


def test_a_tower_with_another_activation_is_an_error() -> None:
    text, tower, top = parts("qwen3_vl")
    with pytest.raises(InputError, match=r"^config.json: vision_config.hidden_act=gelu; only gelu_pytorch_tanh"):
        shape_from_hf(file("qwen3_vl", text, {**tower, "hidden_act": "gelu"}, top))
