"""Refit into TensorRT-LLM's parameters against an oracle: Hugging Face's tensors, sharded as its own loader does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hpcrl.engine.refit.planner import Resharding
from hpcrl.model.params import shards
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.tensorrt_llm.declaration import TensorRTLLM
from hpcrl.rollout.engines.tensorrt_llm.worker import buffers
from hpcrl.runtime.layout import Layout

LAYER = "model.layers.{}."


def hugging_face(shape: ModelShape) -> dict[str, Tensor]:
    """Random weights under Hugging Face's names, (out, in)."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    hidden, ffn, width = shape.hidden_size, shape.ffn_hidden_size, shape.head_dim
    weights = {"model.embed_tokens": draw(shape.vocab_size, hidden), "model.norm": draw(hidden)}
    if not shape.tie_word_embeddings:
        weights["lm_head"] = draw(shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        weights |= {
            f"model.layers.{layer}.{name}": draw(*size)
            for name, size in {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "self_attn.q_proj": (shape.num_attention_heads * width, hidden),
                "self_attn.k_proj": (shape.num_query_groups * width, hidden),
                "self_attn.v_proj": (shape.num_query_groups * width, hidden),
                "self_attn.o_proj": (hidden, shape.num_attention_heads * width),
                "mlp.gate_proj": (ffn, hidden),
                "mlp.up_proj": (ffn, hidden),
                "mlp.down_proj": (hidden, ffn),
            }.items()
        }
    return weights


def megatron(shape: ModelShape, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same model under Megatron's global names: query groups interleaved, vocabulary padded."""
    padding = torch.full((shape.padded_vocab_size - shape.vocab_size, shape.hidden_size), 7.0)
    ours = {
        "embedding.word_embeddings.weight": torch.cat([theirs["model.embed_tokens"], padding]),
        "decoder.final_layernorm.weight": theirs["model.norm"],
    }
    if not shape.tie_word_embeddings:
        ours["output_layer.weight"] = torch.cat([theirs["lm_head"], padding])
    for layer in range(shape.num_layers):
        source, target = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        q, k, v = (
            theirs[f"{source}self_attn.{part}_proj"].unflatten(0, (shape.num_query_groups, -1)) for part in "qkv"
        )
        ours |= {
            f"{target}self_attention.linear_qkv.weight": torch.cat([q, k, v], dim=1).flatten(0, 1),
            f"{target}self_attention.linear_proj.weight": theirs[f"{source}self_attn.o_proj"],
            f"{target}mlp.linear_fc1.weight": torch.cat(
                [theirs[f"{source}mlp.{part}_proj"] for part in ("gate", "up")]
            ),
            f"{target}mlp.linear_fc2.weight": theirs[f"{source}mlp.down_proj"],
            f"{target}input_layernorm.weight": theirs[f"{source}input_layernorm"],
            f"{target}pre_mlp_layernorm.weight": theirs[f"{source}post_attention_layernorm"],
        }
    return ours


def loaded(shape: ModelShape, theirs: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """What a rank of the engine holds after loading a checkpoint: slices of ceil(width / size), zeros behind the
    vocabulary, key-value heads repeated where there are fewer than ranks."""

    def rows(weight: Tensor) -> Tensor:
        width = -(-weight.size(0) // size)
        padded = torch.cat([weight, weight.new_zeros(width * size - weight.size(0), *weight.shape[1:])])
        return padded[rank * width : (rank + 1) * width]

    def columns(weight: Tensor) -> Tensor:
        return rows(weight.T.contiguous()).T

    def heads(weight: Tensor) -> Tensor:
        repeats = max(1, size // shape.num_query_groups)
        return rows(weight.unflatten(0, (shape.num_query_groups, -1)).repeat_interleave(repeats, 0).flatten(0, 1))

    held = {"model.embed_tokens.weight": rows(theirs["model.embed_tokens"]), "model.norm.weight": theirs["model.norm"]}
    if not shape.tie_word_embeddings:
        held["lm_head.weight"] = rows(theirs["lm_head"])
    for layer in range(shape.num_layers):
        name = f"model.layers.{layer}."
        query, key, value = (theirs[f"{name}self_attn.{part}_proj"] for part in "qkv")
        held |= {
            f"{name}self_attn.qkv_proj.weight": torch.cat([rows(query), heads(key), heads(value)]),
            f"{name}self_attn.o_proj.weight": columns(theirs[f"{name}self_attn.o_proj"]),
            f"{name}mlp.gate_up_proj.weight": torch.cat(
                [rows(theirs[f"{name}mlp.{part}_proj"]) for part in ("gate", "up")]
            ),
            f"{name}mlp.down_proj.weight": columns(theirs[f"{name}mlp.down_proj"]),
            f"{name}input_layernorm.weight": theirs[f"{name}input_layernorm"],
            f"{name}post_attention_layernorm.weight": theirs[f"{name}post_attention_layernorm"],
        }
    return held


def trained(shape: ModelShape, ours: dict[str, Tensor], layout: Layout) -> dict[int, dict[str, Tensor]]:
    """Each training rank's shards by their global names."""
    held: dict[int, dict[str, Tensor]] = {}
    for rank in layout.ranks:
        table = shards(shape, layout, rank)
        held[rank] = {}
        for shard in table:
            local = torch.zeros(shard.local_shape)
            whole = ours[shard.name].reshape(len(ours[shard.name]), -1)
            for box in shard.boxes:
                (top, bottom), (left, right) = box.global_rows, box.global_cols
                part = local.view(len(local), -1)[box.local_row :, box.local_col :]
                part[: bottom - top, : right - left] = whole[top:bottom, left:right]
            held[rank][shard.name] = local
    return held


SHAPES = [
    ModelShape(3, 32, 48, 8, 2, 4, 201),
    ModelShape(2, 32, 48, 8, 8, 4, 256, tie_word_embeddings=True),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("source", "destination"),
    [({"tp": 2}, 2), ({"tp": 2, "pp": 2}, 4), ({"tp": 1, "pp": 2}, 1), ({"tp": 2, "pp": 1}, 8)],
)
def test_refit_leaves_what_loading_the_checkpoint_would(
    shape: ModelShape, source: dict[str, int], destination: int
) -> None:
    theirs = hugging_face(shape)
    ranks = tuple(range(max(4, destination)))
    training, rollout = Layout(ranks, **source), Layout(ranks, tp=destination)
    held = trained(shape, megatron(shape, theirs), training)
    engines = {}
    for rank in ranks:
        place = rollout.coord(rank).tp
        table = TensorRTLLM().shards(shape, place, destination)
        named = [(shard.local_name, torch.zeros(shard.local_shape)) for shard in table]
        engines[rank] = buffers(named, table, place)
    plan = Resharding(shape, training, rollout, 4, engine_shards=TensorRTLLM().shards).plan()
    for move in plan.moves:
        value = held[move.src_rank][move.name]
        target = engines[move.dst_rank][move.dst_name]
        part = value.view(len(value), -1)[move.src_row :, move.src_col :][: move.rows, : move.cols]
        target.view(len(target), -1)[move.dst_row :, move.dst_col :][: move.rows, : move.cols] = part
    for rank in ranks:
        expected = loaded(shape, theirs, rollout.coord(rank).tp, destination)
        assert engines[rank].keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(engines[rank][name], value), f"{name} on rank {rank}"


def test_parameters_that_the_plan_does_not_know_are_told() -> None:
    table = TensorRTLLM().shards(SHAPES[0], 0, 2)
    named = {shard.local_name: torch.zeros(shard.local_shape) for shard in table}
    assert buffers([*named.items(), ("model.layers.0.rotary.cos_sin", torch.zeros(2))], table, 0).keys() == named.keys()
    with pytest.raises(RuntimeError, match="1 unknown, such as model.layers.0.self_attn.qkv_proj.bias"):
        buffers([*named.items(), ("model.layers.0.self_attn.qkv_proj.bias", torch.zeros(2))], table, 0)
    del named["lm_head.weight"]
    named["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"1 missing, such as lm_head.weight; 1 of another shape.*model.norm.weight"):
        buffers(named.items(), table, 0)
