"""The engine over a stand-in package: which calls it makes and in which order. Nobody has run it on the real one."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcrl.config.schema import Config
from hpcrl.config.yaml_core import ConfigError
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.tensorrt_llm.arguments import engine_arguments
from hpcrl.rollout.engines.tensorrt_llm.declaration import TensorRTLLM
from hpcrl.rollout.engines.tensorrt_llm.engine import TrtllmEngine, make_engine
from hpcrl.rollout.engines.tensorrt_llm.worker import TrtllmWorker
from hpcrl.rollout.protocol import Request, RolloutEngine, SamplingParams
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.layout import Layout
from tests.rollout.engines.tensorrt_llm.standins import Comm, StandIn, output

SHAPE = ModelShape(1, 16, 32, 4, 2, 4, 50)
SHARDS = TensorRTLLM().shards(SHAPE, 0, 1)
DEVICE = torch.device("cuda", 2)


def config(**rollout: Any) -> Config:
    base = {"engine": "tensorrt_llm", "dtype": "bfloat16", "max_num_seqs": 4, "trtllm": {"model_dir": "/m"}}
    return Config.model_validate({"rollout": base | rollout})


@pytest.fixture
def build(standin: Callable[..., StandIn]) -> Callable[..., tuple[TrtllmEngine, StandIn]]:
    def build(*, public: bool = False, can_sleep: bool = True) -> tuple[TrtllmEngine, StandIn]:
        package = standin({shard.local_name: torch.ones(shard.local_shape) for shard in SHARDS})
        worker = TrtllmWorker(engine_arguments(config(), SHAPE, 1), Comm(), 6, DEVICE, public=public)  # type: ignore[arg-type]
        engine = TrtllmEngine(
            worker, SHARDS, tp_rank=0, share=lambda news: news, max_num_seqs=4, max_model_len=32, vocab_size=50,
            can_sleep=can_sleep,
        )  # fmt: skip
        return engine, package

    return build


def test_an_engine_is_built_on_trainings_device_and_gives_torch_its_memory_back(build: Callable[..., Any]) -> None:
    engine, package = build()
    events = package.events
    assert events[:2] == ["set_mpi_comm", "set_mpi_session_cpp"]  # before anything that communicates
    assert events.index("build") < events.index("start")
    assert events[-2:] == ["set_device cuda:2", "set_per_process_memory_fraction 0.8 cuda:2"]
    assert package.built["devices"] == ([6], [2])  # world rank 6 on training's GPU 2
    assert package.built["llm_args"].model == "/m"
    protocol: RolloutEngine = engine  # mypy: it is one
    assert list(protocol.weights()) == [shard.local_name for shard in SHARDS]


def test_padding_rows_of_the_vocabulary_start_as_zeros(build: Callable[..., Any]) -> None:
    engine, _ = build()
    assert all(not weight.any() for weight in engine.weights().values())


def test_weights_change_while_the_loop_is_paused_and_nothing_cached_outlives_them(build: Callable[..., Any]) -> None:
    engine, package = build()
    package.events.clear()
    with engine.updating_weights():
        package.events.append("write")
        engine.weights()["model.norm.weight"].fill_(2.0)
    assert package.events == ["pause", "synchronize", "write", "reset_prefix_cache", "synchronize", "resume"]
    model = engine._worker._executor.model_engine.model
    assert dict(model.named_parameters())["model.norm.weight"].eq(2.0).all()  # the engine's own memory


def test_a_failed_update_lets_the_loop_go_on(build: Callable[..., Any]) -> None:
    engine, package = build()
    with pytest.raises(KeyError), engine.updating_weights():
        raise KeyError
    assert package.events[-1] == "resume"


def test_sleep_gives_the_cache_back_once_and_wake_takes_it(build: Callable[..., Any]) -> None:
    engine, package = build()
    engine.wake()
    package.events.clear()
    engine.sleep()
    engine.sleep()
    assert package.events == [
        "pause", "synchronize", "reset_prefix_cache", "release kv_cache", "synchronize", "empty_cache", "synchronize",
        "resume",
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match="call wake"):
        engine.generate([Request([1], "a")], SamplingParams(4), seed=0, step=0)
    package.events.clear()
    engine.wake()
    engine.wake()
    assert package.events == ["pause", "synchronize", "materialize kv_cache", "synchronize", "resume"]


def test_an_engine_without_virtual_memory_stays_awake(build: Callable[..., Any]) -> None:
    engine, package = build(can_sleep=False)
    package.events.clear()
    engine.sleep()
    assert not package.events


def test_adopting_is_refused(build: Callable[..., Any]) -> None:
    engine, _ = build()
    with pytest.raises(NotImplementedError, match="alias=false"):
        engine.adopt("model.norm.weight", torch.zeros(16))


@pytest.mark.parametrize("public", [False, True])
def test_requests_go_in_and_completions_come_out(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, public: bool
) -> None:
    monkeypatch.delenv("TLLM_WORKER_USE_SINGLE_PROCESS", raising=False)
    engine, package = build(public=public)
    assert ("TLLM_WORKER_USE_SINGLE_PROCESS" in os.environ) == public
    package.answer = lambda ids, params: output([ids[-1] + 1, params.stop_token_ids[0]])
    sampling = SamplingParams(4, eos_token_ids=(9,))
    found = engine.generate([Request([1, 2], "a"), Request([5], "b")], sampling, seed=0, step=0)
    assert [done.token_ids.tolist() for done in found] == [[3, 9], [6, 9]]
    assert found[0].log_probs.tolist() == [-3.5, -9.5]
    (first, params), (_, other) = package.submitted
    assert first == [1, 2] and params.max_tokens == 4 and params.seed != other.seed
    engine.close()
    assert package.events[-1] == "shutdown"


def test_an_abort_cancels_what_runs(build: Callable[..., Any]) -> None:
    engine, package = build()
    package.answer = lambda ids, params: None if ids == [5] else output([3], "length")
    asked: list[int] = []

    def second_time() -> bool:
        asked.append(1)
        return len(asked) > 1

    found = engine.generate(
        [Request([1], "a"), Request([5], "b")], SamplingParams(4), seed=0, step=0, should_abort=second_time
    )
    assert [done.finish_reason for done in found] == ["length", "abort"]
    assert package.events.count("abort") == 1


def groups(**sizes: int) -> Any:
    layout = Layout((0, 1, 2, 3), **sizes)
    return SimpleNamespace(layout=layout, rank=0, coord=layout.coord(0))


@pytest.mark.parametrize(
    ("sizes", "trtllm", "line"),
    [
        ({"pp": 2}, {}, "placement.rollout.pp=2"),
        ({"tp": 2}, {"design": "single_process"}, "replicas of one rank"),
        ({}, {"model_dir": None}, "rollout.trtllm.model_dir is null"),
        ({}, {}, "cannot be read"),
    ],
)
def test_jobs_that_cannot_be_are_refused(sizes: dict[str, int], trtllm: dict[str, Any], line: str) -> None:
    with pytest.raises((ConfigError, InputError), match=line):
        make_engine(config(trtllm={"model_dir": "/nowhere"} | trtllm), SHAPE, groups(**sizes), torch.device("cpu"))


def test_a_single_process_on_another_gpu_than_training_is_refused(standin: Callable[..., StandIn]) -> None:
    standin({})
    arguments = engine_arguments(config(), SHAPE, 1)
    with pytest.raises(InputError, match="rank 5 on GPU 1, but training uses GPU 2"):
        TrtllmWorker(arguments, Comm(), 5, DEVICE, public=True)  # type: ignore[arg-type]
