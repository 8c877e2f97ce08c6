"""Requests as token lists for TensorRT-LLM, and its outputs as completions: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from hpcrl.rollout.protocol import Completion, FinishReason, Request

FINISH_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "cancelled": "abort"}


class LogProb(Protocol):
    logprob: float


class Output(Protocol):
    """What is read of tensorrt_llm's CompletionOutput."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[Mapping[int, LogProb]]: ...
    @property
    def finish_reason(self) -> str | None: ...


def input_ids(request: Request, vocab_size: int) -> list[int]:
    """Prompt, then what is there of the response. Raises ValueError for none, or for ids that are no tokens."""
    ids = np.concatenate([np.asarray(request.prompt_ids, np.int64), np.asarray(request.prefix_ids, np.int64)])
    if not len(request.prompt_ids):
        raise ValueError(f"prompt {request.uid} has no tokens; give it at least one")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(
            f"prompt {request.uid} has token ids {ids.min()} to {ids.max()}; expected 0 to {vocab_size - 1}"
        )
    return [int(token) for token in ids]


def completion(output: Output, uid: str) -> Completion:
    """Raises RuntimeError where the output is not what version 1.2.1 is expected to give.

    The entry of the sampled token is looked up: taking the first one would, under another sampler or version, give the
    log-prob of another token, and nothing would say so.
    """
    reason = FINISH_REASONS.get(output.finish_reason)
    if reason is None:
        raise RuntimeError(
            f"TensorRT-LLM ended prompt {uid} with finish_reason={output.finish_reason!r}; "
            f"expected one of {', '.join(map(repr, FINISH_REASONS))}"
        )
    tokens, entries = list(output.token_ids), list(output.logprobs or [])
    if reason == "abort":  # whichever of the two got further: a shorter prefix is a prefix, too
        known = min(len(tokens), len(entries))
        tokens, entries = tokens[:known], entries[:known]
    if len(tokens) != len(entries):
        raise RuntimeError(
            f"TensorRT-LLM gave {len(tokens)} tokens and {len(entries)} log-probs for prompt {uid}; "
            "expected one for each: run tools/gpu_check.sh"
        )
    missing = next((place for place, token in enumerate(tokens) if token not in entries[place]), None)
    if missing is not None:
        raise RuntimeError(
            f"TensorRT-LLM gave log-probs of {sorted(entries[missing])} at token {missing} of prompt {uid} and sampled "
            f"{tokens[missing]}; expected the sampled token's: run tools/gpu_check.sh"
        )
    log_probs = [entry[token].logprob for token, entry in zip(tokens, entries, strict=True)]
    return Completion(np.array(tokens, np.int32), np.array(log_probs, np.float32), reason)


def nothing_drawn() -> Completion:
    """Of a request that was aborted before its first token."""
    return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), "abort")
