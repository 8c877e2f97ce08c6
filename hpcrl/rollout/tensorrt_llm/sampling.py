"""Our sampling parameters as keyword arguments of tensorrt_llm.SamplingParams: pure.

Two choices of 1.2.1 decide the rest. Its C++ sampler (sampler_type="TRTLLMSampler") takes a seed per request and gives
the log-prob of the sampled token among the whole vocabulary, after temperature: our definition. The torch sampler has
one generator for all requests, and log-probs before temperature of the likeliest token, not of the sampled one.
That C++ sampler leaves a token equal to `end_id` out of its result, with its log-prob; a stop word stays.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Any

from hpcrl.config.rules import TENSORRT_LLM_TOP_K
from hpcrl.rollout.protocol import Request, SamplingParams
from hpcrl.runtime.exits import InputError

SAMPLER = "TRTLLMSampler"
NUM_LOG_PROBS = 1  # 0 asks 1.2.1 for none


def request_seed(request: Request, *, seed: int, step: int) -> int:
    """63 bits of blake2b over what keys our own random numbers: seed, uid, position, sample index and step.

    The position is the first one to draw, so that what resumes a sequence does not repeat the numbers of its start.
    """
    place = struct.pack("<qqqq", seed, len(request.prefix_ids), request.sample_index, step)
    digest = blake2b(place + request.uid.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sampling_arguments(request: Request, sampling: SamplingParams, *, seed: int, step: int) -> dict[str, Any]:
    """Keyword arguments for one request. Raises InputError for what 1.2.1 cannot do."""
    if sampling.top_k > TENSORRT_LLM_TOP_K:
        raise InputError(
            f"top_k={sampling.top_k} is more than TensorRT-LLM's sampler keeps; "
            f"use {TENSORRT_LLM_TOP_K} or less, or -1 for all"
        )
    greedy = sampling.temperature == 0
    stops = [] if sampling.ignore_eos else list(sampling.eos_token_ids)
    return {
        "max_tokens": new_tokens(request, sampling),
        "temperature": 1.0 if greedy else sampling.temperature,  # log-probs of a greedy token are under temperature 1
        "top_k": 1 if greedy else max(sampling.top_k, 0),
        "top_p": 1.0 if greedy else sampling.top_p,
        "seed": request_seed(request, seed=seed, step=step),
        "end_id": stops[0] if stops else 0,  # unused under ignore_eos, but None makes the package ask for a tokenizer
        "pad_id": stops[0] if stops else 0,
        "ignore_eos": True,
        "stop_token_ids": stops or None,
        "include_stop_str_in_output": True,
        "logprobs": NUM_LOG_PROBS,
        "detokenize": False,
        "add_special_tokens": False,
        "exclude_input_from_output": True,
    }


def new_tokens(request: Request, sampling: SamplingParams) -> int:
    """Tokens to draw at most."""
    if request.max_new_tokens is not None:
        return request.max_new_tokens
    return sampling.max_new_tokens - len(request.prefix_ids)
