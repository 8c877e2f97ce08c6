"""The planner's arithmetic against megatron's modules, and against the live tensor bytes of small engines on the CPU.

A world of several ranks is one process on torch's "fake" backend, whose collectives do nothing: what a rank allocates
does not depend on what the others send.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hpcrl.batch.data_proto import NOT_RECORDED, DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.config.roles import Part
from hpcrl.config.schema import MoeConfig, OptimConfig, RecomputeConfig
from hpcrl.engine.engine import TrainEngine
from hpcrl.forecast.command import parameter_bytes
from hpcrl.forecast.memory.activations import Pass
from hpcrl.forecast.memory.state import RoleModel
from hpcrl.model.blocks.micro_batch import MicroBatch
from hpcrl.model.blocks.router import Routing
from hpcrl.model.gpt import pack
from hpcrl.model.params import Head
from hpcrl.model.shape import Lora, ModelShape
from hpcrl.runtime.groups import fake_rank
from hpcrl.runtime.layout import Layout
from tests.covering import covering
from tests.forecast.memory.passes import DTYPES, TOKENS, loss, make_batch, make_pass
from tests.forecast.memory.shapes import DEEPSEEK, DELTA, GPT_OSS, HYBRID, MOE, SHAPE
from tests.live_bytes import LiveBytes
from tests.strict_device.load import in_place_of_cuda, load

TIED = replace(SHAPE, tie_word_embeddings=True)
SHAPES = {"dense": SHAPE, "tied": TIED, "experts": MOE}
HEADS: tuple[Head, ...] = ("lm", "value")

LAYOUTS = {
    "alone": Layout((0,)),
    "tp2": Layout((0, 1), tp=2),
    "pp2": Layout((0, 1), pp=2),
    "dp3": Layout((0, 1, 2)),
    "tp2pp2": Layout(tuple(range(4)), tp=2, pp=2),
    "pp2vpp2": Layout((0, 1), pp=2, vpp=2),
    "cp2dp2": Layout(tuple(range(4)), cp=2),
    "cp3pp2": Layout(tuple(range(6)), cp=3, pp=2),
    "tp4pp3dp2": Layout(tuple(range(24)), tp=4, pp=3),
}
EVERYTHING = ("parameters", "gradients", "optimizer")
EXPERTS = {"ep2": Layout(tuple(range(4)), tp=2, ep=2), "etp2": Layout(tuple(range(4)), tp=2, ep=2, etp=2)}
ADAM, SGD, MOMENTUM = (
    OptimConfig(lr=1e-3),
    OptimConfig(lr=1e-3, optimizer="sgd"),
    OptimConfig(lr=1e-3, optimizer="sgd", momentum=0.9),
)
MUON = OptimConfig(lr=1e-3, optimizer="muon")
COMPACT = OptimConfig(exp_avg_dtype="bfloat16", betas=[0.9, 0.95], exp_avg_sq_dtype="bfloat16")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("layout", [*LAYOUTS, *EXPERTS])
def test_parameters_are_those_of_megatrons_modules(shape: ModelShape, head: Head, itemsize: int, layout: str) -> None:
    if layout in EXPERTS and not shape.num_experts:
        return
    model = RoleModel(shape, (LAYOUTS | EXPERTS)[layout], head, itemsize)
    for stage in range(model.layout.pp):
        assert model.state(stage).parameters == parameter_bytes(model, stage)


def make_engine(
    model: RoleModel,
    groups,
    head_chunk_tokens: int | None = None,
    recompute: RecomputeConfig | None = None,
    offload: tuple[Part, ...] = (),
    moe: MoeConfig | None = None,
) -> TrainEngine:
    return TrainEngine(
        model.shape,
        groups,
        head=model.head,
        dtype=DTYPES[model.itemsize],
        optim=model.optim,
        total_steps=9,
        sequence_parallel=model.sequence_parallel,
        head_chunk_tokens=head_chunk_tokens,
        recompute=recompute,
        offload=offload,
        moe=moe,
        lora=model.lora,
    )


@covering(
    ["tp4pp3dp2"],
    shape=SHAPES,
    itemsize=(2, 4),
    optim={"adam": ADAM, "frozen": None, "sgd": SGD, "momentum": MOMENTUM, "compact": COMPACT, "muon": MUON},
    layout=("pp2", "alone", "dp3", "pp2vpp2", "cp2dp2", "tp4pp3dp2"),
    head=HEADS,
)
def test_weights_gradients_and_optimizer_are_the_live_bytes(
    shape: ModelShape, head: Head, itemsize: int, optim: OptimConfig | None, layout: str
) -> None:
    model = RoleModel(shape, LAYOUTS[layout], head, itemsize, optim)
    for rank in model.layout.ranks:
        coord = model.layout.coord(rank)
        if coord.tp == 0:
            with fake_rank(model.layout, rank) as groups, LiveBytes() as live:
                engine = make_engine(model, groups)
                if optim is MOMENTUM:  # megatron makes it at the first step
                    for part in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
                        part.init_state_fn(part.optimizer)
                assert live.live() == model.state(coord.pp, rank).total
                del engine


@pytest.mark.parametrize("itemsize", [2, 4])
def test_whole_matrices_of_a_step_are_the_live_bytes(itemsize: int) -> None:
    model = RoleModel(SHAPE, LAYOUTS["alone"], "lm", itemsize, MUON)
    with fake_rank(model.layout, 0) as groups, LiveBytes() as live:
        engine = make_engine(model, groups)
        engine.train(make_batch(), max_tokens=TOKENS, loss=loss)
        resident = live.live()
        live.restart_peak()
        engine._step()
        assert model.update(0) == pytest.approx(live.peak - resident, rel=0.1)
        assert RoleModel(SHAPE, LAYOUTS["alone"], "lm", itemsize, ADAM).update(0) == 0
        del engine


@covering(
    shape={"tied": TIED, "latent_attention": DEEPSEEK},
    itemsize=(2, 4),
    optim={"adam": ADAM, "compact": COMPACT, "muon": MUON, "sgd": SGD, "frozen": None},
)
def test_offloaded_parts_are_where_they_were_planned(
    shape: ModelShape, itemsize: int, optim: OptimConfig | None
) -> None:
    model = RoleModel(shape, LAYOUTS["pp2"], "lm", itemsize, optim)
    with fake_rank(model.layout, 1) as groups, LiveBytes() as live:
        engine, state = make_engine(model, groups, offload=EVERYTHING), model.state(1, 1)
        beside = engine.offload.host_bytes
        assert engine.offload.host_bytes == state.on_host(EVERYTHING) > 0
        assert live.live() - beside == state.without(EVERYTHING).total < 20
        with engine.offload.on_device("parameters", "optimizer"):
            assert live.live() - beside == state.without(["gradients"]).total
            with engine.offload.on_device(*EVERYTHING):
                assert live.live() - beside == state.total
        assert live.live() - beside == state.without(EVERYTHING).total
        del engine


@covering(
    ["tp4pp3dp2", "cp3pp2", "tp2pp2"],
    shape={"dense": SHAPE, "experts": MOE},
    head=HEADS,
    itemsize=(2, 4),
    layout=("alone", "tp2pp2", "pp2vpp2", "cp3pp2", "tp4pp3dp2"),
)
def test_activations_are_the_live_bytes(shape: ModelShape, head: Head, itemsize: int, layout: str) -> None:
    model = RoleModel(shape, LAYOUTS[layout], head, itemsize, ADAM)
    for stage in range(model.layout.pp):
        with fake_rank(model.layout, model.layout.rank_of(pp=stage)) as groups, LiveBytes() as live:
            engine, batch = make_engine(model, groups, head_chunk_tokens=64), make_batch()
            resident = live.live()
            live.restart_peak()
            engine.train(batch, max_tokens=TOKENS, loss=loss, entropy=head == "lm")
            planned = replace(make_pass(model, entropy=head == "lm"), chunk_tokens=64)
            assert sum(planned.training(stage)) == pytest.approx(live.peak - resident, rel=0.1)
            live.restart_peak()
            if head == "lm":
                engine.log_probs(batch, max_tokens=TOKENS, temperature=1.0, entropy=True)
            else:
                engine.values(batch, max_tokens=TOKENS)
            assert sum(planned.forward(stage)) == pytest.approx(live.peak - resident, rel=0.1)
            del engine


@pytest.mark.parametrize("shape", [DEEPSEEK, DELTA, HYBRID], ids=["latent_attention", "gated_delta", "hybrid"])
@pytest.mark.parametrize(("itemsize", "layout"), [(2, "alone"), (4, "tp2pp2")])
def test_all_of_these_with_other_blocks(shape: ModelShape, itemsize: int, layout: str) -> None:
    test_parameters_are_those_of_megatrons_modules(shape, "lm", itemsize, layout)
    test_weights_gradients_and_optimizer_are_the_live_bytes(shape, "lm", itemsize, ADAM, layout)
    test_activations_are_the_live_bytes(shape, "lm", itemsize, layout)
    test_offloaded_parts_are_where_they_were_planned(shape, itemsize, ADAM)


@pytest.mark.parametrize(("itemsize", "layout"), [(2, "alone"), (4, "tp2pp2")])
def test_sinks_and_biases_of_experts(itemsize: int, layout: str) -> None:
    test_parameters_are_those_of_megatrons_modules(GPT_OSS, "lm", itemsize, layout)
    test_activations_are_the_live_bytes(GPT_OSS, "lm", itemsize, layout)


@pytest.mark.parametrize(
    ("chunk", "again"),
    [
        (32, None),
        (32, RecomputeConfig(granularity="full")),
        (None, RecomputeConfig(granularity="full", method="block", num_layers=2)),
        (32, RecomputeConfig(granularity="selective")),
        (32, RecomputeConfig(granularity="selective", modules=["mlp", "core_attn"])),
    ],
    ids=["chunks", "all_again", "first_again", "attention_again", "both_again"],
)
@pytest.mark.parametrize("layout", ["alone", pytest.param("tp2pp2", marks=pytest.mark.slow)])
def test_chunks_and_layers_that_are_computed_again(
    layout: str, chunk: int | None, again: RecomputeConfig | None
) -> None:
    model = RoleModel(SHAPE, LAYOUTS[layout], "lm", 4, ADAM)
    for stage in range(model.layout.pp):
        with fake_rank(model.layout, model.layout.rank_of(pp=stage)) as groups, LiveBytes() as live:
            engine = make_engine(model, groups, chunk, again)
            resident = live.live()
            live.restart_peak()
            engine.train(make_batch(), max_tokens=TOKENS, loss=loss, entropy=True)
            planned = replace(make_pass(model, entropy=True), chunk_tokens=chunk, recompute=again)
            assert sum(planned.training(stage)) == pytest.approx(live.peak - resident, rel=0.1)
            del engine


@pytest.mark.parametrize("layout", ["alone", pytest.param("tp2pp2", marks=pytest.mark.exhaustive)])
def test_what_balance_and_replay_add(layout: str) -> None:
    model, moe = RoleModel(MOE, LAYOUTS[layout], "lm", 4, ADAM), MoeConfig(aux_loss_coeff=0.1, z_loss_coeff=0.1)
    batch = make_batch()
    lengths = batch.fetch("input_ids").lengths * len(MOE.routed.layers) * MOE.moe_topk
    experts = Ragged.from_lengths(np.full(int(lengths.sum()), NOT_RECORDED, np.int16), lengths)
    plain = make_pass(model, entropy=True)
    for stage in range(model.layout.pp):
        peaks, planned = [], []
        for options in ({}, {"moe": moe, "replays_routing": True}):
            with fake_rank(model.layout, model.layout.rank_of(pp=stage)) as groups, LiveBytes() as live:
                engine = make_engine(model, groups, moe=options.get("moe"))
                samples = DataProto({**batch.tokens, **({"routed_experts": experts} if options else {})})
                resident = live.live()
                live.restart_peak()
                engine.train(samples, max_tokens=TOKENS, loss=loss, entropy=True)
                peaks.append(live.peak - resident)
                planned.append(sum(replace(plain, **options).training(stage)))
                del engine
        assert planned[1] - planned[0] == pytest.approx(peaks[1] - peaks[0], rel=0.1)


@pytest.mark.parametrize("shape", [MOE, DEEPSEEK, HYBRID, GPT_OSS], ids=["plain", "groups", "relu2", "biases"])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_what_experts_hold_on_a_device(shape: ModelShape, itemsize: int) -> None:
    """There all experts run at once, as on a GPU; without its kernels, which hold less in the backward pass."""
    model, device = RoleModel(shape, LAYOUTS["alone"], "lm", itemsize, ADAM), load()
    place, block = next((place, layer.mlp) for place, layer in enumerate(shape.layers) if layer.num_experts)
    held = block.held(MicroBatch(model.layout, TOKENS, itemsize))
    with fake_rank(model.layout, 0) as groups, in_place_of_cuda(device):
        mixture = make_engine(model, groups).chunks[0].decoder.layers[place].mlp
        numbers = torch.zeros(TOKENS, dtype=torch.int64, device=device), torch.tensor([TOKENS], device=device)
        routing = Routing(*numbers, shape.routed.layers)
        x = torch.randn(TOKENS, 1, shape.hidden_size, dtype=DTYPES[itemsize]).to(device)
        leaf = x.clone().requires_grad_()
        with torch.no_grad():
            mixture(x, None, routing)
        weights = [*mixture.parameters()]
        apart = [x, leaf, *numbers, *weights, *(weight.main_grad for weight in weights if weight.requires_grad)]
        with LiveBytes(apart) as live, torch.no_grad():
            mixture(x, None, routing)
            assert live.peak == pytest.approx(held.peak, rel=0.02)
        with LiveBytes(apart) as live:
            output, _ = mixture(leaf, None, routing)
            kept = live.live() - output.nbytes
            assert kept == pytest.approx(held.kept, rel=0.02)
            live.restart_peak()
            output.backward(torch.ones_like(output))
            assert live.peak - kept - output.nbytes == pytest.approx(held.backward + 2 * x.nbytes, rel=0.2)


@pytest.mark.parametrize("layout", ["alone", "tp2"])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_what_one_micro_batch_keeps(itemsize: int, layout: str) -> None:
    model = RoleModel(SHAPE, LAYOUTS[layout], "lm", itemsize, ADAM)
    with fake_rank(model.layout, 0) as groups, LiveBytes() as live:
        (module,) = make_engine(model, groups).chunks
        ids, lengths = torch.arange(TOKENS) % 900, torch.full((4,), TOKENS // 4)
        packed = pack(ids, lengths, SHAPE, size=TOKENS, output_rows=torch.arange(0, TOKENS, 2))
        module(packed.input_ids, packed.position_ids, None, packed_seq_params=packed)
        before = live.live()
        logits = module.logits(module(packed.input_ids, packed.position_ids, None, packed_seq_params=packed))
        planned = Pass(model, TOKENS, TOKENS // 2, 1, on_gpu=False)
        assert live.live() - before - logits.nbytes == planned.kept(0)


@pytest.mark.parametrize(
    ("shape", "itemsize", "layout", "lora"),
    [
        (SHAPE, 2, "tp2pp2", Lora(4, 8.0)),
        (replace(MOE, num_layers=2), 4, "alone", Lora(8, 8.0)),
        (SHAPE, 4, "alone", Lora(4, 8.0, ("q_proj", "v_proj"))),
    ],
    ids=["all", "experts", "some"],
)
def test_adapters_are_the_live_bytes(shape: ModelShape, itemsize: int, layout: str, lora: Lora) -> None:
    """Weights of the base, and of adapters all else; activations, without what only gradients of the base read."""
    model = RoleModel(shape, LAYOUTS[layout], "lm", itemsize, ADAM, lora=lora)
    whole = replace(model, lora=None)
    for stage in range(model.layout.pp):
        rank, batch = model.layout.rank_of(pp=stage), make_batch()
        with fake_rank(model.layout, rank) as groups, LiveBytes() as live:
            engine = make_engine(model, groups, head_chunk_tokens=64)
            resident = live.live()
            assert resident == model.state(stage, rank).total
            assert model.state(stage, rank).total < 0.5 * whole.state(stage, rank).total
            live.restart_peak()
            engine.train(batch, max_tokens=TOKENS, loss=loss, entropy=True)
            planned = replace(make_pass(model, entropy=True), chunk_tokens=64)
            assert sum(planned.training(stage)) == pytest.approx(live.peak - resident, rel=0.1)
            live.restart_peak()
            engine.log_probs(batch, max_tokens=TOKENS, temperature=1.0, entropy=True)
            assert sum(planned.forward(stage)) == pytest.approx(live.peak - resident, rel=0.1)
            live.restart_peak()
            before = live.peak
            for weight in engine.merged_shards().values():
                del weight
            factors = 2**14  # bytes, in fp32
            assert 0 <= live.peak - before - model.merged(stage) < factors
            del engine
