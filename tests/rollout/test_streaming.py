"""Responses leave the engine as they finish, and are scored while others are still being generated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from hpcrl.config.schema import CustomRewardConfig, RewardConfig
from hpcrl.model.shape import ModelShape
from hpcrl.rewards.manager import RewardManager, ScoreRequest
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.protocol import Completion, Request, SamplingParams

SHAPE = ModelShape(
    num_layers=1,
    hidden_size=16,
    ffn_hidden_size=16,
    num_attention_heads=2,
    num_query_groups=2,
    head_dim=8,
    vocab_size=12,
)
SAMPLING = SamplingParams(30, eos_token_ids=(1,))


def make_engine() -> NativeEngine:
    engine = NativeEngine(SHAPE, None, 0, 1, torch.float32, max_num_seqs=6, max_num_batched_tokens=64, max_model_len=40)
    generator = torch.Generator().manual_seed(0)
    for weight in engine.weights().values():
        weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    engine.wake()
    return engine


def make_requests() -> list[Request]:
    return [Request(np.array([2, 3 + number % 5]), f"file:{number}:0") for number in range(16)]


def test_every_response_is_told_once_when_it_is_complete() -> None:
    engine, told, events = make_engine(), {}, []

    def finished(index: int, completion: Completion) -> None:
        assert index not in told
        told[index] = completion
        events.append(index)

    def step() -> None:
        events.append(None)

    completions = engine.generate(make_requests(), SAMPLING, seed=0, step=0, on_finished=finished, on_step=step)
    assert told == dict(enumerate(completions))  # the same objects
    plain = engine.generate(make_requests(), SAMPLING, seed=0, step=0)
    assert [done.token_ids.tolist() for done in plain] == [done.token_ids.tolist() for done in completions]
    # Of those that start together the shorter one is told first, at least as many steps earlier as it is shorter.
    lengths = [len(completions[index].token_ids) for index in range(6)]
    short, long = int(np.argmin(lengths)), int(np.argmax(lengths))
    assert lengths[short] < lengths[long]
    assert events[events.index(short) : events.index(long)].count(None) >= lengths[long] - lengths[short]


def test_scores_are_there_before_generation_ends(tmp_path: Path) -> None:
    """The engine's step waits for the first response's score: it comes, from another process, while others run."""
    (tmp_path / "score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(len(solution_str.split()))\n"
    )
    manager = RewardManager(RewardConfig(custom_reward_function=CustomRewardConfig(path=str(tmp_path / "score.py"))))
    submitted: list[int] = []
    first: list[float] = []

    def finished(index: int, completion: Completion) -> None:
        manager.submit(index, ScoreRequest("mine", " ".join(map(str, completion.token_ids)), None))
        submitted.append(index)

    def step() -> None:
        manager.pump()
        if submitted and not first:
            assert len(submitted) < len(requests)
            first.extend(manager.collect(submitted[:1])[0])

    requests = make_requests()
    try:
        completions = make_engine().generate(requests, SAMPLING, seed=0, step=0, on_finished=finished, on_step=step)
        scores, *_ = manager.collect(submitted[1:])
        assert first + scores.tolist() == [len(completions[index].token_ids) for index in submitted]
    finally:
        manager.close()
