"""Losses that balance experts, against their definitions in other libraries, and choices that are replayed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from hpcrl.batch.data_proto import NOT_RECORDED, DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.engine.engine import TrainEngine
from hpcrl.engine.microbatch import make_micro_batches
from hpcrl.model.blocks.router import Router
from hpcrl.model.build import named_parameters
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.engine import BLOCK_SIZE
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.engines.tensorrt_llm.declaration import kv_bytes_per_token
from hpcrl.rollout.protocol import Request, SamplingParams, Trajectory
from hpcrl.workers.response_columns import response_columns
from hpcrl.workers.response_stream import Response
from tests.mpi.layouts import (
    DEEPSEEK,
    MIXTURE,
    ROUTER_LOSSES,
    SGD,
    assert_slices,
    gradients,
    make_batch,
    part_of,
    policy_loss,
    role_groups,
)


def nothing(outputs: dict[str, torch.Tensor], batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    return outputs["log_probs"].sum() * 0.0, {}


def router_logits(engine: TrainEngine, batch: Any) -> list[list[torch.Tensor]]:
    """(tokens, experts) with gradients, by sequence, each of which runs alone, and layer."""
    found: list[list[torch.Tensor]] = []
    options: dict[str, Any] = {"max_tokens": 1000, "count": 1, "multiple": 8, "same_size": False}

    def keep(router: Router, inputs: tuple[torch.Tensor, Any], _: Any) -> None:
        hidden, routing = inputs
        found[-1].append(router.gating(hidden)[: int(routing.lengths), 0])

    hooks = [module.register_forward_hook(keep) for module in engine.chunks[0].modules() if isinstance(module, Router)]
    for row in range(len(batch)):
        found.append([])
        packed = make_micro_batches(batch[[row]], MIXTURE, device=torch.device("cpu"), **options)[0].packed
        engine.chunks[0](packed.input_ids, packed.position_ids, None, packed_seq_params=packed)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.world(1)
def test_losses_are_those_of_their_papers(world) -> None:
    """transformers sums over the places of a choice where we take their mean; it has one sequence at a time here, as a
    product of means over several is another number."""
    groups, batch = role_groups(0, 1)["single"], make_batch()
    engine = TrainEngine(MIXTURE, groups, optim=SGD, seed=3, **ROUTER_LOSSES)
    metrics = engine.train(batch, max_tokens=64, loss=nothing)

    other = TrainEngine(MIXTURE, groups, seed=3)
    other.chunks[0].requires_grad_(True)
    logits = router_logits(other, batch)
    experts, topk = MIXTURE.num_experts, MIXTURE.moe_topk
    aux = torch.stack([load_balancing_loss_func((of,), experts, topk) / topk for row in logits for of in row])
    num_tokens = sum(len(row[0]) for row in logits)
    squares = torch.stack([of.exp().sum(1).log().square().sum() for row in logits for of in row])
    num_layers = len(MIXTURE.routed.layers)
    assert metrics["moe_aux_loss"] == pytest.approx(float(aux.mean()), rel=1e-5)
    assert metrics["moe_z_loss"] == pytest.approx(float(squares.sum()) / num_layers / num_tokens, rel=1e-5)
    load = torch.stack(
        [torch.cat(of).topk(topk).indices.flatten().bincount(minlength=experts) for of in zip(*logits, strict=True)]
    )
    imbalance = load.max(1).values / load.float().mean(1)
    assert metrics["moe_load_imbalance/mean"] == pytest.approx(float(imbalance.mean()))
    assert metrics["moe_load_imbalance/max"] == pytest.approx(float(imbalance.max()))

    (0.3 * aux.sum() / len(logits) + 0.1 * squares.sum() / num_tokens).backward()
    parameters, found = named_parameters(other.chunks), gradients(engine)
    norm = torch.stack([gradient.norm() for gradient in found.values()]).norm()
    for _, name in parameters:
        expected = parameters[0, name].grad
        difference = found[name] if expected is None else found[name] - expected
        assert difference.norm() < 1e-5 * norm, name


LAYOUTS = {1: ("single",), 2: ("tp2ep2", "cp2", "pp2vpp2"), 4: ("tp2pp2vpp2", "cp2ep2")}
PLACES = [
    pytest.param(name, marks=[pytest.mark.world(size), *([] if name in ("single", "tp2ep2") else [pytest.mark.slow])])
    for size, names in LAYOUTS.items()
    for name in names
]
WIDTH = len(MIXTURE.routed.layers) * MIXTURE.moe_topk


@pytest.mark.parametrize("layout", PLACES)
def test_a_replayed_choice_is_kept_by_other_routers(world, layout: str) -> None:
    """Tokens go where one model has recorded them to go, whatever another model's routers say; the last of each
    sequence, which has no recording, where these send it. Any layout records and replays as one rank alone does, and
    its routers learn."""
    groups, options = role_groups(world.rank, world.size), {"max_tokens": 64, "temperature": 1.0}
    batch = make_batch()
    recorder = TrainEngine(MIXTURE, groups["alone"], seed=3)
    recording = recorder.log_probs(batch, record_routing=True, **options)["routed_experts"]
    assert np.array_equal(recording.lengths, batch.fetch("input_ids").lengths * WIDTH)
    for row in range(len(batch)):
        recording.row(row)[-WIDTH:] = NOT_RECORDED
    replayed = DataProto({**batch.tokens, "routed_experts": recording})
    mine, mine_replayed = (part_of(samples, groups[layout]) for samples in (batch, replayed))

    others = (TrainEngine(MIXTURE, groups[name], optim=SGD, seed=4, **ROUTER_LOSSES) for name in (layout, "alone"))
    engine, alone = others
    for samples in (mine, mine_replayed):
        found = engine.log_probs(samples, record_routing=True, **options)
        expected = alone.log_probs(samples, record_routing=True, **options)
        if found:
            torch.testing.assert_close(found["log_probs"].values, expected["log_probs"].values, rtol=0, atol=1e-4)
            assert_same_choice(found["routed_experts"], expected["routed_experts"])
    own = alone.log_probs(mine, record_routing=True, **options)
    assert np.abs(expected["log_probs"].values - own["log_probs"].values).max() > 1e-3
    for row in range(len(mine)):
        wanted, kept = mine_replayed.fetch("routed_experts").row(row), expected["routed_experts"].row(row)
        assert np.array_equal(kept[:-WIDTH], wanted[:-WIDTH])
        assert kept[-WIDTH:].min() >= 0

    found = engine.train(mine_replayed, max_tokens=64, loss=policy_loss, entropy=True)
    assert found == pytest.approx(alone.train(replayed, max_tokens=64, loss=policy_loss, entropy=True), rel=1e-4)
    assert_slices(engine, gradients(engine), gradients(alone))
    assert all(gradient.norm() > 1e-4 for name, gradient in gradients(engine).items() if "router" in name)


@pytest.mark.parametrize(
    ("layout", "shape", "limits"),
    [
        pytest.param("single", DEEPSEEK, {}, marks=pytest.mark.world(1)),
        pytest.param("single", MIXTURE, {"max_num_batched_tokens": 7, "num_blocks": 9}, marks=pytest.mark.world(1)),
        pytest.param("etp2", MIXTURE, {}, marks=[pytest.mark.world(2), pytest.mark.slow]),
    ],
    ids=["roomy, groups of experts", "prompts in parts, sequences sent back", "two ranks"],
)
def test_the_rollout_engine_tells_where_tokens_went(
    world, layout: str, shape: ModelShape, limits: dict[str, int]
) -> None:
    """Of every token that it has run, where training's routers send it; also when a response is cut off and goes on."""
    groups = role_groups(world.rank, world.size)[layout]
    trainer = TrainEngine(shape, groups, seed=3)
    size, itemsize, longest = groups.layout.tp, torch.float32.itemsize, 64
    engine = NativeEngine(
        shape,
        groups.tp if size > 1 else None,
        groups.coord.tp,
        size,
        torch.float32,
        max_num_seqs=5,
        max_num_batched_tokens=limits.get("max_num_batched_tokens", 64),
        max_model_len=longest,
        kv_cache_bytes=limits.get("num_blocks", 100) * kv_bytes_per_token(shape, size, itemsize) * BLOCK_SIZE,
    )
    for name, weight in engine.weights().items():
        weight.copy_(trainer.named_shards()[name])
    prompts = [np.arange(length, dtype=np.int32) % 40 for length in (1, 2, 30)]
    requests = [Request(prompt, str(len(prompt)), sample) for prompt in prompts for sample in range(3)]
    sampling, width = SamplingParams(30, routed_experts=True), len(shape.routed.layers) * shape.moe_topk
    done = engine.generate(requests, sampling, seed=0, step=0)
    plain = engine.generate(requests, replace(sampling, routed_experts=False), seed=0, step=0)
    for with_experts, without in zip(done, plain, strict=True):
        assert np.array_equal(with_experts.token_ids, without.token_ids) and without.routed_experts is None
    calls = iter(range(1000))
    parts = engine.generate(requests, sampling, seed=0, step=0, should_abort=lambda: next(calls) == 17)
    responses = [Response(request, 0, 0) for request in requests]
    for response, part in zip(responses, parts, strict=True):
        response.extend(part, 0)
    open_ = [response for response in responses if response.conversation.finish_reason == "abort"]
    assert any(response.conversation.num_tokens for response in open_)
    more = engine.generate([one.conversation.next_request() for one in open_], sampling, seed=0, step=0)
    for response, part in zip(open_, more, strict=True):
        response.extend(part, 0)

    ended = [one.conversation.trajectory("length") for one in responses]
    for trajectories in ([Trajectory.from_completion(one) for one in done], ended):
        batch = response_columns(requests, trajectories)
        expected = trainer.log_probs(batch, max_tokens=200, temperature=1.0, record_routing=True)["routed_experts"]
        found = batch.fetch("routed_experts")
        for row in range(len(batch)):
            assert (found.row(row)[-width:] == NOT_RECORDED).all()
            found.row(row)[-width:] = expected.row(row)[-width:]
        assert_same_choice(found, expected, shape)


def assert_same_choice(found: Ragged, expected: Ragged, shape: ModelShape = MIXTURE) -> None:
    """A choice is a set."""
    assert np.array_equal(found.offsets, expected.offsets)
    sets = (np.sort(column.values.reshape(-1, shape.moe_topk), axis=1) for column in (found, expected))
    assert np.array_equal(*sets)
