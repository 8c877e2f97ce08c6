"""Requests to token lists, outputs to completions."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from hpcrl.rollout.engines.tensorrt_llm.arguments import completion
from hpcrl.rollout.protocol import Request, SamplingParams
from tests.rollout.engines.tensorrt_llm.standins import output


def test_the_input_is_the_prompt_and_what_there_is_of_the_response() -> None:
    request = Request(np.array([1, 2], np.int32), "a", prefix_ids=np.array([3], np.int32))
    found = request.context_ids(SamplingParams(4), 16, 10)
    assert found.dtype == np.int32 and found.tolist() == [1, 2, 3]


@pytest.mark.parametrize("ids", [[], [-1, 2], [2, 10]])
def test_what_is_no_prompt_is_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="prompt a"):
        Request(ids, "a").context_ids(SamplingParams(4), 16, 10)


@pytest.mark.parametrize(("theirs", "ours"), [("stop", "stop"), ("length", "length"), ("cancelled", "abort")])
def test_finish_reasons(theirs: str, ours: str) -> None:
    done = completion(output([5, 6], theirs, [-1.0, -2.0]), "a")
    assert done.finish_reason == ours
    assert done.token_ids.dtype == np.int32 and done.token_ids.tolist() == [5, 6]
    assert done.log_probs.dtype == np.float32 and done.log_probs.tolist() == [-1.0, -2.0]


@pytest.mark.parametrize("reason", ["timeout", None])
def test_an_unknown_end_is_an_error(reason: str | None) -> None:
    with pytest.raises(RuntimeError, match="finish_reason"):
        completion(output([5], reason), "a")  # type: ignore[arg-type]


def test_the_log_prob_is_that_of_the_sampled_token() -> None:
    """A sampler that gives the likeliest token's first must not be believed."""
    entry = {3: SimpleNamespace(logprob=-0.1), 5: SimpleNamespace(logprob=-4.0)}
    found = SimpleNamespace(token_ids=[5], logprobs=[entry], finish_reason="length")
    assert completion(found, "a").log_probs.tolist() == [-4.0]
    with pytest.raises(RuntimeError, match="expected the sampled token's"):
        completion(SimpleNamespace(token_ids=[6], logprobs=[entry], finish_reason="length"), "a")


def test_a_missing_log_prob_is_an_error_but_shortens_what_was_aborted() -> None:
    with pytest.raises(RuntimeError, match="2 tokens and 1 log-probs"):
        completion(output([5, 6], "stop", [-1.0]), "a")
    cut = completion(output([5, 6], "cancelled", [-1.0]), "a")
    assert cut.token_ids.tolist() == [5] and cut.log_probs.tolist() == [-1.0]
