"""The architecture that a job's `model:` section describes, and which jobs and which models take pictures. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.model.families.config_json import CONFIG, hf_config, read_shape, shape_from_hf
from hpcrl.model.families.family import rope_from_hf
from hpcrl.model.hf_files import Safetensors
from hpcrl.model.shape import ModelShape
from hpcrl.model.vision import Vision, tower_tensors
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from hpcrl.config.schema import Config, ModelConfig


def shape_of(model: ModelConfig, num_tokens: int) -> ModelShape:
    """Return the shape described by a section `model:`, from its Hugging Face directory if it names one.

    Raises InputError also if the directory's files do not fit the shape.

    Args:
        num_tokens: number of ids of the tokenizer; 0: not known.
    """
    if model.path is None:
        shape = shape_from_yaml(model, num_tokens)
    elif model.hf_config:
        raise InputError(f"model.path={model.path} and model.hf_config describe a model each; remove one of them")
    else:
        folder = Path(model.path)
        shape = read_shape(folder)
        if shape.vocab_size < num_tokens:
            raise InputError(
                f"{folder / CONFIG}: vocab_size={shape.vocab_size} is below the tokenizer's {num_tokens}; use the "
                "tokenizer of this model"
            )
        Safetensors(folder).check(shape)
    if model.softmax_vocab == "tokenizer" and num_tokens:
        shape = replace(shape, tokenizer_size=num_tokens)
    return with_training(shape, model)


def shape_from_yaml(model: ModelConfig, vocab_size: int) -> ModelShape:
    """Return the shape described by `model:`; `vocab_size` is the tokenizer's, used if the YAML has none.

    Raises InputError for an invalid model, and for one that config.json of its family cannot describe.
    """
    if model.hf_config:
        shape = shape_from_hf(model.hf_config, "model.hf_config")
        if shape.vocab_size < vocab_size:
            raise InputError(
                f"model.hf_config.vocab_size={shape.vocab_size} is below the tokenizer's {vocab_size}; raise it"
            )
        return shape
    vocab = model.vocab_size or vocab_size
    if vocab < vocab_size:
        raise InputError(f"model.vocab_size={vocab} is below the tokenizer's {vocab_size}; leave it null or raise it")
    shape = ModelShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        head_dim=_head_dim(model),
        vocab_size=vocab,
        max_position_embeddings=model.max_position_embeddings,
        rope_theta=model.rope_theta,
        rope_scaling=_rope_scaling(model),
        rms_norm_eps=model.rms_norm_eps,
        init_std=model.init_std,
        tie_word_embeddings=model.tie_word_embeddings,
        family=model.family,
        qkv_bias=model.family == "qwen2",
        qk_norm=model.family in ("qwen3", "qwen3_moe"),
        **(_experts(model) if model.num_experts else {}),
    )
    _check_family(shape)
    return shape


def with_training(shape: ModelShape, model: ModelConfig) -> ModelShape:
    """Return the shape, with the part of its vision tower that is trained."""
    if shape.vision is not None:
        return replace(shape, vision=replace(shape.vision, train=model.vision.train, lr=model.vision.lr))
    if model.vision.train != "none":
        raise InputError(
            f"model.vision.train={model.vision.train}, and the model of model.path={model.path} has no vision tower; "
            "use a vision-language model, or none"
        )
    return shape


def check_longest(shape: ModelShape, config: Config, section: str) -> None:
    """Raise InputError if sequences may be longer than the context of the model of this section."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    shape.check_longest(longest, "data.max_prompt_length + data.max_response_length", f"the model of {section}")


def _head_dim(model: ModelConfig) -> int:
    if model.head_dim is not None:
        return model.head_dim
    if model.hidden_size % model.num_attention_heads:
        raise InputError(
            f"model.num_attention_heads={model.num_attention_heads} does not divide "
            f"model.hidden_size={model.hidden_size}; change one of them or set model.head_dim"
        )
    return model.hidden_size // model.num_attention_heads


def _rope_scaling(model: ModelConfig) -> Any:
    if model.rope_scaling is None:
        return None
    keys = {
        "rope_theta": model.rope_theta,
        "rope_scaling": model.rope_scaling.model_dump(exclude_none=True),
        "max_position_embeddings": model.max_position_embeddings,
    }
    try:
        return rope_from_hf(keys)[1]
    except InputError as error:
        raise InputError(f"model.rope_scaling: {error}") from error


def _experts(model: ModelConfig) -> dict[str, Any]:
    dense = tuple(sorted(set(model.dense_layers)))
    if dense and dense[-1] >= model.num_layers:
        raise InputError(f"model.dense_layers={list(dense)}: model.num_layers={model.num_layers}; layers count from 0")
    return {
        "num_experts": model.num_experts,
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size or model.ffn_hidden_size,
        "moe_topk": model.moe_topk,
        "moe_norm_topk_prob": model.moe_norm_topk_prob,
        "dense_layers": dense,
    }


def _check_family(shape: ModelShape) -> None:
    """Check that the family's config.json can describe the shape, because an export would lose the rest."""
    if bool(shape.num_experts) != (shape.family in ("qwen3_moe", "mixtral")):
        raise InputError(
            f"model.family={shape.family} with model.num_experts={shape.num_experts}; "
            "qwen3_moe and mixtral have experts, the others none"
        )
    exported = shape_from_hf(hf_config(shape), "model")
    for field in fields(ModelShape):
        expected, actual = getattr(shape, field.name), getattr(exported, field.name)
        if expected != actual:
            raise InputError(
                f"model.family={shape.family} has {field.name}={actual}, not {expected}; use that or another family"
            )


def check_vision(config: Config, vision: Vision) -> None:
    """Raise InputError if the job has settings that do not work with a vision tower."""
    train = vision.train != "none"
    unsupported = {
        f"rollout.engine={config.rollout.engine} with pictures is not supported; use native": (
            "pictures" not in config.engine.supports
        ),
        "rollout.exact=true with pictures is not supported; use false": config.rollout.exact,
        f"model.vision.train={vision.train} with model.lora_rank={config.model.lora_rank}: adapters are all that is "
        "trained of a model with them; use none": train and config.model.lora_rank > 0,
        f"model.vision.train={vision.train} with async_training.mode=bounded_staleness is not supported: features of "
        "waiting prompts would be older than the weights; use one_step_off": (
            train and config.async_training.mode == "bounded_staleness"
        ),
        f"model.vision.train={vision.train} with model.recompute.granularity=full is not supported for a tower whose "
        "features join several layers; use selective": (
            train and vision.num_deepstack > 0 and config.model.recompute.granularity == "full"
        ),
    }
    for line, is_wanted in unsupported.items():
        if is_wanted:
            raise InputError(line)


def check_towers(policy: ModelShape, models: Mapping[str, ModelShape]) -> None:
    """Raise InputError for a model that cannot read the pictures of the policy.

    Args:
        models: the models by config section.
    """
    expected = policy.vision
    if expected is None:
        return
    for section, shape in models.items():
        tower = shape.vision
        if tower is None:
            raise InputError(
                f"the model of {section} has no vision tower, and the policy's prompts have pictures; name a "
                f"vision-language model in {section}.model.path"
            )
        if expected.train == "none" and tower_tensors(tower) != tower_tensors(expected):
            raise InputError(
                f"the vision tower of {section}.model differs from the policy's, whose features it would get with "
                "model.vision.train=none; use a model with the same tower"
            )
        if (tower.patch_width, tower.merge_size) != (expected.patch_width, expected.merge_size):
            raise InputError(
                f"{section}.model has {tower.patch_width} numbers per patch and {tower.merge_size}^2 patches per "
                f"token, the policy {expected.patch_width} and {expected.merge_size}^2; use a model with the same "
                "patches"
            )
