"""Llama in Hugging Face's names and order of rows, and in ours (`hpcrl.model.params`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcrl.launch.exits import InputError
from hpcrl.model.params import EMBEDDING, OUTPUT_LAYER
from hpcrl.model.shape import ModelShape

Read = Callable[[str], Tensor]


class Entry(NamedTuple):
    """One of our parameters and those of Hugging Face that it is made of.

    `join(theirs)` gives ours, `split(ours)` theirs; whole tensors, in any dtype.
    """

    name: str
    hf_names: tuple[str, ...]
    join: Callable[[list[Tensor]], Tensor]
    split: Callable[[Tensor], list[Tensor]]


def entries(shape: ModelShape) -> Iterator[Entry]:
    """The table, in the order of the model. Tied embeddings stand once, as the embedding."""

    def pad_vocabulary(theirs: list[Tensor]) -> Tensor:
        (table,) = theirs
        return torch.cat([table, table.new_zeros(shape.padded_vocab_size - len(table), *table.shape[1:])])

    def cut_vocabulary(ours: Tensor) -> list[Tensor]:
        return [ours[: shape.vocab_size]]

    def join_qkv(theirs: list[Tensor]) -> Tensor:
        """Rows of q, k and v by query group: the group's queries, its key, its value."""
        by_group = [part.view(shape.num_query_groups, -1, part.size(-1)) for part in theirs]
        return torch.cat(by_group, dim=1).flatten(0, 1)

    def split_qkv(ours: Tensor) -> list[Tensor]:
        queries = shape.num_attention_heads // shape.num_query_groups
        by_group = ours.view(shape.num_query_groups, -1, ours.size(-1))
        parts = by_group.split([queries * shape.head_dim, shape.head_dim, shape.head_dim], dim=1)
        return [part.flatten(0, 1) for part in parts]

    yield Entry(EMBEDDING, ("model.embed_tokens.weight",), pad_vocabulary, cut_vocabulary)
    for layer in range(shape.num_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for name, hf_names, join, split in (
            ("input_layernorm", ("input_layernorm",), _only, _alone),
            (
                "self_attention.linear_qkv",
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                join_qkv,
                split_qkv,
            ),
            ("self_attention.linear_proj", ("self_attn.o_proj",), _only, _alone),
            ("pre_mlp_layernorm", ("post_attention_layernorm",), _only, _alone),
            ("mlp.linear_fc1", ("mlp.gate_proj", "mlp.up_proj"), torch.cat, _halves),
            ("mlp.linear_fc2", ("mlp.down_proj",), _only, _alone),
        ):
            yield Entry(f"{ours}{name}.weight", tuple(f"{theirs}{hf_name}.weight" for hf_name in hf_names), join, split)
    yield Entry("decoder.final_layernorm.weight", ("model.norm.weight",), _only, _alone)
    if not shape.tie_word_embeddings:
        yield Entry(OUTPUT_LAYER, ("lm_head.weight",), pad_vocabulary, cut_vocabulary)


def from_hf(shape: ModelShape, read: Read) -> Iterator[tuple[str, Tensor]]:
    """Our whole parameters one by one, from `read(their name)`."""
    for entry in entries(shape):
        yield entry.name, entry.join([read(name) for name in entry.hf_names])


def to_hf(shape: ModelShape, read: Read) -> Iterator[tuple[str, Tensor]]:
    """Theirs one by one, views where that is possible, from `read(our name)`, whole parameters."""
    for entry in entries(shape):
        yield from zip(entry.hf_names, entry.split(read(entry.name)), strict=True)


def shape_from_hf(config: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """The shape that a Llama's config.json describes; raises InputError for what our model does not compute."""
    rope = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta"),
        **(config.get("rope_scaling") or {}),
    }
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    for key, found, expected in (
        ("model_type", config.get("model_type"), "llama"),
        ("hidden_act", config.get("hidden_act", "silu"), "silu"),
        ("attention_bias", config.get("attention_bias", False), False),
        ("mlp_bias", config.get("mlp_bias", False), False),
        ("rope_type", rope_type, "default"),
    ):
        if found != expected:
            raise InputError(f"{where}: {key}={found}; only {expected} is supported, so take another model")
    heads = config["num_attention_heads"]
    # the defaults are those of transformers' LlamaConfig
    return ModelShape(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        max_position_embeddings=config.get("max_position_embeddings", 2048),
        rope_theta=rope.get("rope_theta") or 10000.0,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        init_std=config.get("initializer_range", 0.02),
        tie_word_embeddings=config.get("tie_word_embeddings", False),
    )


def hf_config(shape: ModelShape) -> dict[str, Any]:
    """config.json of `shape`, for transformers 4 (rope_theta) and 5 (rope_parameters) alike."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_query_groups,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rms_norm_eps": shape.rms_norm_eps,
        "initializer_range": shape.init_std,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _only(theirs: list[Tensor]) -> Tensor:
    (tensor,) = theirs
    return tensor


def _alone(ours: Tensor) -> list[Tensor]:
    return [ours]


def _halves(ours: Tensor) -> list[Tensor]:
    return list(ours.chunk(2))
