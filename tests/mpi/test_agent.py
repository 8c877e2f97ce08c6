"""Conversations on the native engine: all ranks of a replica have the same ones, whatever its size, and training agrees
with the log-probs of what the model wrote behind the answers of tools."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from hpcrl.algorithms.metrics import Metric, finish
from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.config.schema import DataConfig, MultiTurnConfig
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.engine.engine import TrainEngine
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.environments.loop import AgentLoop
from hpcrl.rollout.protocol import Request, SamplingParams, Trajectory
from hpcrl.runtime.groups import GroupCache, make_groups
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.mpi import create_group
from tests.rollout.small_model import SHAPE

if TYPE_CHECKING:
    from hpcrl.runtime.world import World

# Random weights write no calls: here a turn is one unless it ends in a letter. Answers take their time, by their text.
TOOLS = """
import time
from hpcrl.rollout.environments.tools import ToolCall, register_tool_parser
from hpcrl.rollout.environments.tools import tool

@tool
def ponder(text: str) -> str:
    "Thinks."
    time.sleep(sum(map(ord, text)) % 4 / 1000)
    return text[::-1][:5] + "!"

@register_tool_parser("nearly_all")
def nearly_all(text):
    return [] if text[-1:].isalpha() else [ToolCall("ponder", {"text": text})]
"""

pytestmark = pytest.mark.ci_world(2)

LAYOUTS = {1: Layout((0,)), 2: Layout((0, 1), tp=2), 4: Layout((0, 1, 2, 3), tp=2)}
LIMIT = 48


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(Path(__file__).parents[2] / "configs" / "tool_tokenizer"))


@pytest.fixture(scope="module")
def cfg(world: World, tmp_path_factory: pytest.TempPathFactory) -> MultiTurnConfig:
    path = tmp_path_factory.mktemp("agent") / "tools.py"  # a file of each rank's own
    path.write_text(TOOLS)
    multi_turn = MultiTurnConfig(enable=True, function_tool_path=str(path), num_tool_workers=2, max_assistant_turns=6)
    return multi_turn.model_copy(update={"format": "nearly_all"})


@pytest.fixture(scope="module")
def cache(world: World) -> GroupCache:
    return GroupCache(world.rank)


def make_engines(world: World, layout: Layout, cache: GroupCache, vocab_size: int) -> tuple[TrainEngine, NativeEngine]:
    """Both with the same weights, drawn from the seed whatever the layout."""
    shape = replace(SHAPE, vocab_size=vocab_size, init_std=0.3)
    groups = make_groups({"actor": layout}, world.rank, cache)["actor"]
    actor = TrainEngine(shape, groups, seed=3)
    engine = NativeEngine(
        shape,
        groups.tp if layout.tp > 1 else None,
        groups.coord.tp,
        layout.tp,
        torch.float32,
        max_num_seqs=7,
        max_num_batched_tokens=64,
        max_model_len=16 + LIMIT,
    )
    for name, weight in engine.weights().items():
        weight.copy_(actor.named_shards()[name])
    engine.wake()
    return actor, engine


def make_requests(replica: int) -> list[Request]:
    generator = np.random.default_rng(replica)
    prompts = [generator.integers(3, 98, generator.integers(1, 16)) for _ in range(8)]
    return [Request(prompt, f"{replica}:{number}:0", k) for number, prompt in enumerate(prompts) for k in range(3)]


def converse(
    world: World, cfg: MultiTurnConfig, tokenizer: Any, layout: Layout, cache: GroupCache
) -> tuple[TrainEngine, list[Request], list[Trajectory], dict[str, Metric]]:
    """The training engine, what was asked, the trajectories, their metrics."""
    actor, engine = make_engines(world, layout, cache, len(tokenizer))
    coord = layout.coord(world.rank)
    ranks = layout.group_of(world.rank, "tp")
    comm = create_group(world.comm, ranks, tag=11) if len(ranks) > 1 else None
    loop = AgentLoop(cfg, DataConfig(), tokenizer, comm)
    sampling = SamplingParams(LIMIT, temperature=0.9, eos_token_ids=(2, *range(3, 98, 4)))
    requests = make_requests(coord.dp)
    told: list[int] = []
    trajectories, metrics = loop.run(
        engine, requests, None, sampling, seed=1, step=2, on_finished=lambda number, _: told.append(number)
    )
    loop.close()
    if comm is not None:
        comm.Free()
    assert sorted(told) == list(range(len(requests)))
    return actor, requests, trajectories, metrics


def plain(trajectory: Trajectory) -> tuple[Any, ...]:
    arrays = (trajectory.token_ids, trajectory.log_probs, trajectory.mask)
    rest = (trajectory.finish_reason, trajectory.num_turns, trajectory.num_tool_calls)
    return (*(array.tolist() for array in arrays), *rest)


def test_conversations_are_the_same_on_all_ranks_and_layouts_and_training_agrees(
    world: World, cfg: MultiTurnConfig, tokenizer: Any, cache: GroupCache
) -> None:
    layout = LAYOUTS[world.size]
    actor, requests, found, metrics = converse(world, cfg, tokenizer, layout, cache)

    assert {
        reason for reasons in world.all_gather_object({one.finish_reason for one in found}) for reason in reasons
    } == {
        "stop",
        "length",
    }
    assert max(one.num_turns for one in found) >= 4 and min(one.num_turns for one in found) == 1
    by_rank = world.all_gather_object([(plain(one), one.prefill) for one in found])
    assert sum(one.prefill.reused for one in found) > 0
    for rank in layout.group_of(world.rank, "tp"):
        assert by_rank[rank] == by_rank[world.rank]
    if layout.coord(world.rank).tp == 0:
        calls = sum(one.num_tool_calls for one in found)
        assert finish(metrics)["tools/calls"] == calls > 0 and finish(metrics)["tools/rejected"] == 0
    else:
        assert metrics == {}

    # A token whose u lies on a boundary may differ between layouts; with these seeds none does.
    alone = converse(world, cfg, tokenizer, Layout((world.rank,)), cache)[2]
    if layout.coord(world.rank).dp == 0:
        for one, other in zip(found, alone, strict=True):
            assert plain(one)[0] == plain(other)[0] and plain(one)[2:] == plain(other)[2:]
            np.testing.assert_allclose(one.log_probs, other.log_probs, rtol=0, atol=1e-4)

    rows = [np.concatenate([request.prompt_ids, one.token_ids]) for request, one in zip(requests, found, strict=True)]
    batch = DataProto(
        {
            "input_ids": Ragged.from_rows(rows, np.int32),
            "response_mask": Ragged.from_rows([one.mask for one in found]),
        }
    )
    trained = actor.log_probs(batch, max_tokens=200, temperature=0.9)["log_probs"].values
    mask, drawn = (np.concatenate([getattr(one, name) for one in found]) for name in ("mask", "log_probs"))
    assert not drawn[mask == 0].any() and 0 < mask.mean() < 1
    np.testing.assert_allclose(drawn[mask == 1], trained[mask == 1], rtol=0, atol=1e-4)
