"""The parameter table: sharded over any layout it tiles each global tensor exactly."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.model.blocks.attention import Attention, Rope
from hpcrl.model.blocks.block import Layer
from hpcrl.model.blocks.feed_forward import FeedForward
from hpcrl.model.blocks.mixture import MixtureOfExperts
from hpcrl.model.blocks.norms import Norms
from hpcrl.model.params import (
    Shard,
    check_adapters,
    check_layout,
    chunk_layers,
    engine_layout,
    role_layout,
    shards,
    stage_layers,
)
from hpcrl.model.shape import Lora, ModelShape
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.layout import Layout


def make_shape(**changes: object) -> ModelShape:
    sizes = {
        "num_layers": 3,
        "hidden_size": 8,
        "ffn_hidden_size": 12,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "head_dim": 2,
        "vocab_size": 50,
    }
    return ModelShape(**(sizes | changes))  # type: ignore[arg-type]


def held(shape: ModelShape, tp_size: int, pp_size: int, head: str = "lm") -> dict[str, np.ndarray]:
    """How often each element of each global parameter is held by the ranks of one replica."""
    counts: dict[str, np.ndarray] = {}
    layout = Layout(tuple(range(tp_size * pp_size)), tp=tp_size, pp=pp_size)
    for rank in layout.ranks:
        for shard in shards(shape, layout, rank, head=head):
            cols = shard.global_shape[1] if len(shard.global_shape) == 2 else 1
            count = counts.setdefault(shard.name, np.zeros((shard.global_shape[0], cols), dtype=int))
            local = np.zeros((shard.local_shape[0], shard.local_shape[1] if len(shard.local_shape) == 2 else 1))
            for box in shard.boxes:
                count[slice(*box.global_rows), slice(*box.global_cols)] += 1
                rows = box.global_rows[1] - box.global_rows[0]
                width = box.global_cols[1] - box.global_cols[0]
                local[box.local_row : box.local_row + rows, box.local_col : box.local_col + width] += 1
            assert (local == 1).all(), shard
    return counts


@given(tp_size=st.sampled_from([1, 2, 4]), pp_size=st.integers(1, 3), head=st.sampled_from(["lm", "value"]))
def test_shards_tile_every_parameter(tp_size: int, pp_size: int, head: str) -> None:
    shape = make_shape()
    counts = held(shape, tp_size, pp_size, head)
    assert list(counts) == list(held(shape, 1, 1, head))
    for name, count in counts.items():
        replicated = "layernorm" in name or name == "value_head.weight"
        assert (count == (tp_size if replicated else 1)).all(), name


@given(
    tp_size=st.sampled_from([1, 2]),
    stages=st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1)]),
    ep_size=st.sampled_from([1, 2, 4]),
    etp_size=st.sampled_from([1, 2]),
    dense_layers=st.sampled_from([(), (1, 3)]),
)
def test_experts_are_tiled_by_the_expert_grid(
    tp_size: int, stages: tuple[int, int], ep_size: int, etp_size: int, dense_layers: tuple[int, ...]
) -> None:
    shape = make_shape(num_layers=5, num_experts=4, moe_ffn_hidden_size=6, dense_layers=dense_layers)
    ranks = tuple(range(stages[0] * math.lcm(tp_size, ep_size * etp_size)))
    layout = Layout(ranks, tp=tp_size, pp=stages[0], vpp=stages[1], ep=ep_size, etp=etp_size)

    def rank(pp: int, tp: int = 0, ep: int = 0, etp: int = 0, part: str = "all") -> list[Shard]:
        places = {rank: (layout.coord(rank), layout.expert_coord(rank)) for rank in ranks}
        found = next(
            rank
            for rank, (dense, expert) in places.items()
            if dense.pp == pp and ((expert.ep, expert.etp) == (ep, etp) if part == "experts" else dense.tp == tp)
        )
        return shards(shape, layout, found, part=part)  # type: ignore[arg-type]

    whole = shards(shape)
    counts = {shard.name: 0 for shard in whole}
    for pp in range(stages[0]):
        for ep, etp in itertools.product(range(ep_size), range(etp_size)):
            for shard in rank(pp, ep=ep, etp=etp, part="experts"):
                assert shard.is_expert
                counts[shard.name] += math.prod(shard.local_shape)
        for tp in range(tp_size):
            for shard in rank(pp, tp=tp, part="dense"):
                assert not shard.is_expert
                if not (shard.tp_replicated and tp):
                    counts[shard.name] += math.prod(shard.local_shape)
        assert {s.name for s in rank(pp)} == {s.name for part in ("dense", "experts") for s in rank(pp, part=part)}
    assert counts == {shard.name: math.prod(shard.global_shape) for shard in whole}


def test_layouts_of_experts_that_only_blocks_have() -> None:
    """Those of a family with blocks of its own, whose shape has no number of experts."""
    attention, mixture = Attention(8, Rope(2, 1e4), 8, 4, 2), MixtureOfExperts(8, 4, 6, 2)
    layers = (Layer(attention, FeedForward(8, 12), Norms()), *[Layer(attention, mixture, Norms())] * 2)
    own, flat = make_shape(blocks=layers), make_shape(num_experts=4, moe_ffn_hidden_size=6, dense_layers=(0,))
    for grid in ({"tp": 2, "ep": 2}, {"tp": 2, "etp": 2}, {"pp": 2, "ep": 2}):
        layout = role_layout(own, "actor", ranks=(0, 1, 2, 3), **grid)
        assert all(shards(own, layout, rank) == shards(flat, layout, rank) for rank in layout.ranks)
    assert role_layout(own, "rollout", ranks=(0, 1), tp=2).etp == engine_layout(own, 2).etp == 2
    for grid, line in (({"ep": 3}, "actor.ep=3 does not divide num_experts=4"), ({"etp": 4}, "actor.etp=4 does not")):
        with pytest.raises(InputError, match=line):
            role_layout(own, "actor", ranks=tuple(range(12)), **grid)
    with pytest.raises(InputError, match="placement.actor.pp=3 makes a pipeline stage with dense layers only"):
        role_layout(own, "actor", ranks=(0, 1, 2), pp=3)


def test_a_stage_without_experts_is_refused() -> None:
    shape = make_shape(num_layers=4, num_experts=4, moe_ffn_hidden_size=6, dense_layers=(0, 1))
    assert role_layout(shape, "actor", ranks=(0, 1), pp=1).dp == 2
    with pytest.raises(InputError, match=r"placement.actor.pp=2 makes a pipeline stage with dense layers only"):
        role_layout(shape, "actor", ranks=(0, 1), pp=2)


def test_adapters_of_experts_alone_on_some_stages_are_refused() -> None:
    shape = make_shape(num_layers=4, num_experts=4, moe_ffn_hidden_size=8, dense_layers=(0,))
    layout = Layout((0, 1), pp=2)
    check_adapters(shape, layout, Lora(2, 4.0))
    with pytest.raises(InputError, match="add a projection of attention, or use pp=1"):
        check_adapters(shape, layout, Lora(2, 4.0, ("gate_proj", "up_proj")))


def test_names_of_experts_count_over_the_model() -> None:
    shape = make_shape(num_experts=4, moe_ffn_hidden_size=6, dense_layers=(1, 3))
    its = shards(shape, Layout((0, 1, 2, 3), tp=2, pp=2, ep=2), 3)
    names = {shard.name: shard.local_name for shard in its if ".mlp." in shard.name}
    assert names == {
        "decoder.layers.2.mlp.router.weight": "decoder.layers.0.mlp.router.weight",
        **{
            f"decoder.layers.2.mlp.experts.local_experts.{expert}.{linear}.weight": (
                f"decoder.layers.0.mlp.experts.local_experts.{expert - 2}.{linear}.weight"
            )
            for expert in (2, 3)
            for linear in ("linear_fc1", "linear_fc2")
        },
    }


@given(num_layers=st.integers(4, 40), data=st.data())
def test_chunks_hold_the_layers_that_megatron_gives_them(num_layers: int, data: st.DataObject) -> None:
    """Stages and chunks of any size, against Megatron's own description of an uneven interleaved pipeline."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    pp_size = data.draw(st.integers(2, num_layers // 2))
    vpp_size = data.draw(st.integers(2, num_layers // pp_size))
    sizes = [len(stage_layers(num_layers, piece, pp_size * vpp_size)) for piece in range(pp_size * vpp_size)]
    layout = [["decoder"] * size for size in sizes]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    theirs = PipelineParallelLayerLayout(layout, pp_size)
    for stage in range(pp_size):
        for chunk in range(vpp_size):
            ours = chunk_layers(num_layers, stage, pp_size, chunk, vpp_size)
            kinds = [kind.name for kind in theirs.layout[stage][chunk]]
            before = sum(
                kind.name == "decoder"
                for number in range(chunk * pp_size + stage)
                for kind in theirs.layout[number % pp_size][number // pp_size]
            )
            assert ours == range(before, before + kinds.count("decoder"))
            shape = make_shape(num_layers=num_layers)
            its = [
                shard.local_name
                for shard in shards(shape, Layout(tuple(range(pp_size)), pp=pp_size, vpp=vpp_size), stage)
                if shard.chunk == chunk
            ]
            assert ("embedding.word_embeddings.weight" in its) == ("embedding" in kinds)
            assert ("output_layer.weight" in its) == ("loss" in kinds)
            assert sum("input_layernorm" in name for name in its) == len(ours)


def test_names_are_megatrons_with_global_layer_numbers() -> None:
    names = [(s.name, s.local_name) for s in shards(make_shape(), Layout((0, 1, 2, 3), tp=2, pp=2), 2)]
    assert names == [
        (f"decoder.layers.2.{name}.weight", f"decoder.layers.0.{name}.weight")
        for name in (
            "input_layernorm",
            "self_attention.linear_qkv",
            "self_attention.linear_proj",
            "pre_mlp_layernorm",
            "mlp.linear_fc1",
            "mlp.linear_fc2",
        )
    ] + [(name, name) for name in ("decoder.final_layernorm.weight", "output_layer.weight")]


def test_value_head_is_whole_on_every_tp_rank_of_the_last_stage() -> None:
    last = shards(make_shape(), Layout((0, 1, 2, 3), tp=2, pp=2), 3, head="value")[-1]
    assert (last.name, last.local_name, last.local_shape) == ("value_head.weight", "output_layer.weight", (1, 8))
    assert last.tp_replicated


@pytest.mark.parametrize("pp_size", [1, 2])
def test_tied_embedding_has_a_copy_on_the_last_stage(pp_size: int) -> None:
    shape = make_shape(tie_word_embeddings=True)
    counts = held(shape, 2, pp_size)
    assert "output_layer.weight" not in counts
    assert (counts["embedding.word_embeddings.weight"] == pp_size).all()
    if pp_size == 2:
        last = shards(shape, Layout((0, 1, 2, 3), tp=2, pp=2), 2)[-1]
        assert (last.name, last.local_name) == ("embedding.word_embeddings.weight", "output_layer.weight")


@given(num_layers=st.integers(1, 40), data=st.data())
def test_first_stages_hold_the_remainder(num_layers: int, data: st.DataObject) -> None:
    pp_size = data.draw(st.integers(1, num_layers))
    stages = [stage_layers(num_layers, pp_rank, pp_size) for pp_rank in range(pp_size)]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in stages]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize(("tp_size", "pp_size", "found"), [(3, 1, "actor.tp=3"), (1, 4, "actor.pp=4")])
def test_a_layout_that_does_not_fit_is_one_clear_line(tp_size: int, pp_size: int, found: str) -> None:
    with pytest.raises(InputError, match=found):
        check_layout(make_shape(), Layout(tuple(range(tp_size * pp_size)), tp=tp_size, pp=pp_size), "actor")
