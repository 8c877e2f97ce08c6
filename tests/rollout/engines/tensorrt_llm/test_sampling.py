"""Our sampling parameters as TensorRT-LLM's. The package itself has never been asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpcrl.rollout.engines.tensorrt_llm import signatures
from hpcrl.rollout.engines.tensorrt_llm.arguments import request_seed, sampling_arguments
from hpcrl.rollout.protocol import Request, SamplingParams
from hpcrl.runtime.exits import InputError


def arguments(request: Request | None = None, **sampling: Any) -> dict[str, Any]:
    request = request or Request([1, 2], "a:0:0")
    return sampling_arguments(request, SamplingParams(**{"max_new_tokens": 8} | sampling), seed=3, step=5)


def test_all_tokens_at_a_temperature() -> None:
    found = arguments(temperature=0.7, top_p=0.9, eos_token_ids=(7, 9))
    assert (found["temperature"], found["top_k"], found["top_p"], found["max_tokens"]) == (0.7, 0, 0.9, 8)
    assert arguments(top_k=20)["top_k"] == 20


def test_greedy_is_the_likeliest_token_with_its_log_prob_under_temperature_1() -> None:
    found = arguments(temperature=0.0, top_k=50, top_p=0.5)
    assert (found["temperature"], found["top_k"], found["top_p"]) == (1.0, 1, 1.0)


def test_end_of_sequence_tokens_are_stop_words_that_stay_in_the_output() -> None:
    found = arguments(eos_token_ids=(7, 9))
    assert found["stop_token_ids"] == [7, 9] and found["include_stop_str_in_output"] and found["ignore_eos"]
    going_on = arguments(eos_token_ids=(7, 9), ignore_eos=True)
    assert going_on["stop_token_ids"] is None and going_on["ignore_eos"]
    assert all(isinstance(each["end_id"], int) and isinstance(each["pad_id"], int) for each in (found, going_on))


def test_log_probs_are_asked_for() -> None:
    """0 is taken for none by version 1.2.1."""
    assert arguments()["logprobs"] == 1


def test_what_is_there_counts_against_the_limit() -> None:
    prefix = np.array([4, 5, 6], np.int32)
    assert arguments(Request([1], "a", prefix_ids=prefix))["max_tokens"] == 5
    assert arguments(Request([1], "a", prefix_ids=prefix, max_new_tokens=2))["max_tokens"] == 2


def test_a_top_k_that_the_sampler_would_cut_is_refused() -> None:
    assert arguments(top_k=1024)["top_k"] == 1024
    with pytest.raises(InputError, match="top_k=1025"):
        arguments(top_k=1025)


def test_the_keys_are_those_of_the_signature_table() -> None:
    assert tuple(arguments()) == signatures.SAMPLING


def test_seeds_differ_by_each_part_of_the_key_and_by_nothing_else() -> None:
    def seed(uid: str = "a:0:0", sample: int = 0, prefix: int = 0, seed: int = 0, step: int = 0) -> int:
        return request_seed(Request([1], uid, sample, np.zeros(prefix, np.int32)), seed=seed, step=step)

    distinct = [seed(), seed("a:0:1"), seed(sample=1), seed(prefix=1), seed(seed=1), seed(step=1), seed(seed=-1)]
    assert len(set(distinct)) == len(distinct) and all(0 <= value < 2**63 for value in distinct)
    assert seed() == request_seed(Request([9, 9], "a:0:0", max_new_tokens=4), seed=0, step=0)
