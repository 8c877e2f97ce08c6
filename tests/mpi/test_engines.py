"""Other engines in the ranks: after a refit from any layout they draw the native engine's tokens.

The engine of docs/examples, a plugin, runs where vLLM is not installed; vLLM in an environment of its own, because it
pins torch and transformers (tools/vllm_environment.sh):
.venv-vllm/bin/mpiexec -n 1|2|3 .venv-vllm/bin/python -m pytest tests/mpi/test_engines.py
"""

from __future__ import annotations

import importlib.util
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch

from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.config.schema import Config
from hpcrl.engine.engine import TrainEngine
from hpcrl.engine.refit.planner import Resharding
from hpcrl.engine.refit.refit import Refit
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.engine import engine_of
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.protocol import Completion, Request, RequestSource, RolloutEngine, SamplingParams
from hpcrl.runtime.groups import GroupCache, RoleGroups, make_groups
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.world import World

HAS_VLLM = importlib.util.find_spec("vllm") is not None
PLUGIN = Path(__file__).parents[2] / "docs" / "examples" / "transformers_engine.py"
SHAPE = ModelShape(3, 128, 96, 4, 2, 32, 300, init_std=0.2)
SHAPES = {
    "qwen2": replace(SHAPE, family="qwen2", qkv_bias=True, tie_word_embeddings=True),
    "qwen3": replace(SHAPE, family="qwen3", qk_norm=True),
    "moe": replace(SHAPE, family="qwen3_moe", qk_norm=True, num_experts=4, moe_ffn_hidden_size=64, moe_topk=2),
    "window": replace(SHAPE, family="mistral", windows=(9, 9, 9)),
}
CASES = {"transformers": ("qwen2", "qwen3"), "vllm": tuple(SHAPES)}
CACHE = 100 * 2**20  # bytes
# ranks -> training, ranks of rollout; three ranks: the engine's pool is a part of the world
LAYOUTS = {
    1: (Layout((0,)), (0,)),
    2: (Layout((0, 1), pp=2), (0, 1)),
    3: (Layout((0,)), (1, 2)),
}
SAMPLINGS = {
    "plain": SamplingParams(24),
    "filtered": SamplingParams(24, temperature=0.7, top_p=0.9, top_k=50),
    "greedy": SamplingParams(24, temperature=0.0),
    "stops": SamplingParams(24, eos_token_ids=tuple(range(5, 40))),
}


def make_requests() -> list[Request]:
    generator = np.random.default_rng(0)
    prompts = [generator.integers(2, 300, generator.integers(1, 30)) for _ in range(8)]
    return [Request(prompt, f"file:{number}:0", sample) for number, prompt in enumerate(prompts) for sample in range(4)]


class Sides(NamedTuple):
    """On this rank: training, the engine and the native one with the same weights; None where a rank has no part.

    nbytes: of the engine's weights, without rows that pad a vocabulary.
    """

    actor: TrainEngine | None
    other: RolloutEngine | None
    native: NativeEngine | None
    rollout: Layout
    refits: tuple[Refit, ...]
    nbytes: int

    def refit(self) -> None:
        """Refit both engines. Each byte of the engine's weights is written once."""
        source, moved = self.actor.named_shards() if self.actor else {}, []
        for refit, engine in zip(self.refits, (self.other, self.native), strict=True):
            with engine.updating_weights() if engine else nullcontext():
                report = refit.run(source, engine.weights() if engine else {})
            moved.append(report.bytes_received + report.bytes_copied)
        assert moved[0] == self.nbytes


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((engine, model), id=f"{engine}-{model}", marks=[pytest.mark.exhaustive] * (model != "qwen3"))
        for engine, models in CASES.items()
        for model in models
    ],
)
def sides(request: pytest.FixtureRequest, world: World) -> Sides:
    engine, model = request.param
    if HAS_VLLM != (engine == "vllm"):
        pytest.skip("it runs in another environment")
    if world.size not in LAYOUTS:
        pytest.skip(f"there is no layout of {world.size} ranks")
    shape, (training, ranks) = SHAPES[model], LAYOUTS[world.size]
    tp = len(ranks) if engine == "vllm" else 1
    rollout = Layout(ranks, tp=tp, etp=tp if shape.routed else 1)
    groups = make_groups({"actor": training, "rollout": rollout}, world.rank, GroupCache(world.rank))
    config = Config.model_validate(
        {
            "rollout": {
                "engine": engine,
                "max_num_seqs": 16,
                "max_num_batched_tokens": 64,
                "kv_cache_gib": CACHE / 2**30,
            },
            "data": {"max_prompt_length": 32, "max_response_length": 32},
            "run": {"plugins": [str(PLUGIN)]},
        }
    )
    actor = TrainEngine(shape, groups["actor"], seed=3) if "actor" in groups else None
    other, native, nbytes = None, None, 0
    if "rollout" in groups:
        other = engine_of(config).make(groups["rollout"], shape, config, ranks_on_node=world.size)
        native = make_native(shape, groups["rollout"])
        shards = engine_of(config).shards(shape, groups["rollout"].coord.tp, tp)
        nbytes = 4 * sum(math.prod(map(np.ptp, box[:2])) for shard in shards for box in shard.boxes)
    make = lambda layout: Refit(  # noqa: E731
        Resharding(shape, training, rollout, 4, engine_shards=layout), world.comm, world.rank, torch.float32
    )
    made = Sides(actor, other, native, rollout, (make(engine_of(config).layout), make(None)), nbytes)
    made.refit()
    return made


def make_native(shape: ModelShape, groups: RoleGroups) -> NativeEngine:
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 64}
    group = groups.tp if groups.layout.tp > 1 else None
    return NativeEngine(shape, group, groups.coord.tp, groups.layout.tp, torch.float32, **options)


def draw(engine: RolloutEngine, sampling: SamplingParams, requests: list[Request] | None = None, **options: Any) -> Any:
    return engine.generate(make_requests() if requests is None else requests, sampling, seed=1, step=4, **options)


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    """All but a few equal to the end: a token whose number lies at a boundary may differ."""
    same = [one.token_ids.tolist() == other.token_ids.tolist() for one, other in zip(found, expected, strict=True)]
    assert sum(same) >= 0.96 * len(same)  # log-probs differ by up to 4e-5 here
    for one, other, is_same in zip(found, expected, same, strict=True):
        if is_same:
            np.testing.assert_allclose(one.log_probs, other.log_probs, rtol=0, atol=1e-4)
            assert one.finish_reason == other.finish_reason


@pytest.mark.parametrize("name", SAMPLINGS)
def test_it_draws_the_native_engines_tokens(sides: Sides, name: str) -> None:
    if sides.other is not None and sides.native is not None:
        assert_same(draw(sides.other, SAMPLINGS[name]), draw(sides.native, SAMPLINGS[name]))


def test_log_probs_are_those_of_training(world: World, sides: Sides) -> None:
    sampling = SAMPLINGS["filtered"]
    done = world.broadcast_object(draw(sides.other, sampling) if sides.other else None, sides.rollout.ranks[0])
    if sides.actor is None:
        return
    rows = [[*request.prompt_ids, *it.token_ids] for request, it in zip(make_requests(), done, strict=True)]
    masks = [np.ones(len(it.token_ids), np.float32) for it in done]
    batch = DataProto({"input_ids": Ragged.from_rows(rows, np.int32), "response_mask": Ragged.from_rows(masks)})
    found = sides.actor.log_probs(batch, max_tokens=200, temperature=sampling.temperature)
    if sides.actor.groups.is_last_stage:
        assert np.abs(found["log_probs"].values - np.concatenate([it.log_probs for it in done])).max() < 1e-4


def test_a_response_continues_where_it_was_aborted(sides: Sides) -> None:
    if sides.other is None:
        return
    sampling, calls = SAMPLINGS["plain"], iter(range(1000))
    whole = draw(sides.other, sampling)
    begun = draw(sides.other, sampling, should_abort=lambda: next(calls) > 9)
    assert {it.finish_reason for it in begun} >= {"abort"}
    requests = [replace(it, prefix_ids=part.token_ids) for it, part in zip(make_requests(), begun, strict=True)]
    open_ = [number for number, part in enumerate(begun) if part.finish_reason == "abort"]
    rest = dict(zip(open_, draw(sides.other, sampling, [requests[number] for number in open_]), strict=True))
    for number, part in enumerate(begun):
        ids = [*part.token_ids, *(rest[number].token_ids if number in rest else ())]
        assert ids == whole[number].token_ids.tolist()


class InParts(RequestSource):
    def __init__(self) -> None:
        self.left = make_requests()

    def take(self, idle: bool) -> list[Request] | None:
        part, self.left = self.left[:3], self.left[3:]
        return part or None


def test_requests_may_come_while_others_run(sides: Sides) -> None:
    if sides.other is not None:
        ended: list[int] = []
        options = {"source": InParts(), "on_finished": lambda index, _: ended.append(index)}
        found = draw(sides.other, SAMPLINGS["plain"], [], **options)
        assert_same(found, draw(sides.other, SAMPLINGS["plain"]))
        assert sorted(ended) == list(range(len(make_requests())))


@pytest.mark.skipif(not HAS_VLLM, reason="the other engine keeps no cache")
def test_the_cache_is_freed_and_comes_back(sides: Sides) -> None:
    if sides.other is not None:
        expected = draw(sides.other, SAMPLINGS["plain"])
        full = psutil.Process().memory_info().rss
        sides.other.sleep()
        assert full - psutil.Process().memory_info().rss > 0.9 * CACHE
        with pytest.raises(RuntimeError, match="asleep"):
            draw(sides.other, SAMPLINGS["plain"])
        sides.other.wake()
        assert_same(draw(sides.other, SAMPLINGS["plain"]), expected)


def test_a_refit_takes_effect_in_every_weight(world: World, sides: Sides) -> None:
    """An engine may compute with copies of its weights; then their bytes prove nothing."""
    names = world.broadcast_object(list(sides.actor.named_shards()) if sides.actor else None, 0)
    parts = world.all_gather_object(list(sides.actor.named_shards()) if sides.actor else [])
    requests, sampling = make_requests()[::4], replace(SAMPLINGS["greedy"], max_new_tokens=4)
    for name in dict.fromkeys(name for part in parts for name in part) if world.size > 1 else names:
        before = draw(sides.other, sampling, requests) if sides.other else []
        for change in (0.2, -0.2):
            weight = sides.actor.named_shards().get(name) if sides.actor else None
            if weight is not None:
                weight += change
            sides.refit()
            if sides.other is not None and change > 0:
                after = draw(sides.other, sampling, requests)
                assert any(
                    one.log_probs.tolist() != other.log_probs.tolist() for one, other in zip(before, after, strict=True)
                ), name
                assert sides.native is not None
                assert_same(after, draw(sides.native, sampling, requests))
