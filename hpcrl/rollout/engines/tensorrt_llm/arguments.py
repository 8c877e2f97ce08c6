"""Translation between hpcrl and TensorRT-LLM: arguments, sampling parameters, requests and outputs. Pure functions.

The C++ sampler of 1.2.1 (sampler_type="TRTLLMSampler") takes a seed per request and returns the log-prob of the sampled
token over the whole vocabulary, after temperature, which is hpcrl's definition. The torch sampler has one generator for
all requests, and returns log-probs before temperature of the most likely token. The C++ sampler drops a token equal to
`end_id` and its log-prob from the result; a stop word is kept.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from hpcrl.config.schema import Config
from hpcrl.model.families.config_json import CONFIG, read_shape
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.tensorrt_llm.declaration import TOKENS_PER_BLOCK, TOP_K, TensorRTLLM, kv_bytes_per_token
from hpcrl.rollout.protocol import Completion, FinishReason, Request, SamplingParams
from hpcrl.runtime.exits import InputError

SAMPLER = "TRTLLMSampler"
NUM_LOG_PROBS = 1  # 0: 1.2.1 returns none


def request_seed(request: Request, *, seed: int, step: int) -> int:
    """Return 63 bits of blake2b over the key of hpcrl's own random numbers: seed, uid, position, sample index and step.

    The position is that of the first token to draw, so that a resumed sequence does not repeat the numbers of its
    start.
    """
    place = struct.pack("<qqqq", seed, request.position, request.sample_index, step)
    digest = blake2b(place + request.uid.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sampling_arguments(request: Request, sampling: SamplingParams, *, seed: int, step: int) -> dict[str, Any]:
    """Return the keyword arguments for one request. Raises InputError for parameters that 1.2.1 does not support."""
    if sampling.top_k > TOP_K:
        raise InputError(
            f"top_k={sampling.top_k} is above the limit of TensorRT-LLM's sampler; use {TOP_K} or less, or -1 for all"
        )
    greedy = sampling.temperature == 0
    stops = [] if sampling.ignore_eos else list(sampling.eos_token_ids)
    return {
        "max_tokens": request.num_to_draw(sampling),
        "temperature": 1.0 if greedy else sampling.temperature,  # log-probs of a greedy token are under temperature 1
        "top_k": 1 if greedy else max(sampling.top_k, 0),
        "top_p": 1.0 if greedy else sampling.top_p,
        "seed": request_seed(request, seed=seed, step=step),
        "end_id": stops[0] if stops else 0,  # unused under ignore_eos, but with None the package needs a tokenizer
        "pad_id": stops[0] if stops else 0,
        "ignore_eos": True,
        "stop_token_ids": stops or None,
        "include_stop_str_in_output": True,
        "logprobs": NUM_LOG_PROBS,
        "detokenize": False,
        "add_special_tokens": False,
        "exclude_input_from_output": True,
    }


FINISH_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "cancelled": "abort"}


def completion(output: Any, uid: str) -> Completion:
    """Convert a CompletionOutput of tensorrt_llm. Raises RuntimeError if it is not what version 1.2.1 should return.

    The entry of the sampled token is looked up by id: under another sampler or version the first entry could silently
    be that of another token.
    """
    reason = FINISH_REASONS.get(output.finish_reason)
    if reason is None:
        raise RuntimeError(
            f"TensorRT-LLM ended prompt {uid} with finish_reason={output.finish_reason!r}; "
            f"expected one of {', '.join(map(repr, FINISH_REASONS))}"
        )
    tokens, entries = list(output.token_ids), list(output.logprobs or [])
    if reason == "abort":  # tokens and log-probs may differ in length: keep the common part
        common = min(len(tokens), len(entries))
        tokens, entries = tokens[:common], entries[:common]
    if len(tokens) != len(entries):
        raise RuntimeError(
            f"TensorRT-LLM returned {len(tokens)} tokens and {len(entries)} log-probs for prompt {uid}; "
            "expected one for each: run tools/gpu_check.sh"
        )
    missing = next((place for place, token in enumerate(tokens) if token not in entries[place]), None)
    if missing is not None:
        raise RuntimeError(
            f"TensorRT-LLM returned log-probs of {sorted(entries[missing])} at token {missing} of prompt {uid} and "
            f"sampled {tokens[missing]}; expected the sampled token's: run tools/gpu_check.sh"
        )
    log_probs = [entry[token].logprob for token, entry in zip(tokens, entries, strict=True)]
    return Completion(np.array(tokens, np.int32), np.array(log_probs, np.float32), reason)


ITEMSIZE = 2  # bytes: bfloat16 is the only dtype
GIB = 2**30

# Key of config.json, or property of its model_type -> the field of ModelShape that must be equal
ARCHITECTURE = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
    "rope_scaling": "rope_scaling",
    "attention_bias": "qkv_bias",
    "q_norm": "qk_norm",
}


def engine_arguments(config: Config, shape: ModelShape, tp_size: int) -> dict[str, Any]:
    """Return the keyword arguments of TorchLlmArgs; "kv_cache_config" and "cuda_graph_config" are dicts.

    Raises ConfigError or InputError for settings that this engine does not support.
    """
    TensorRTLLM().check(config, tp_size)
    rollout = config.rollout
    longest = max_model_len(config)
    return {
        "model": str(model_dir(config)),
        "skip_tokenizer_init": True,
        "load_format": "dummy",  # refit brings the weights
        "dtype": "bfloat16",
        "tensor_parallel_size": tp_size,
        "pipeline_parallel_size": 1,
        "allreduce_strategy": "NCCL",  # its own all-reduce is documented to fail with several engines in a job
        "sampler_type": SAMPLER,
        "max_batch_size": rollout.max_num_seqs,
        "max_num_tokens": rollout.max_num_batched_tokens,
        "max_seq_len": longest,
        "max_input_len": longest,  # a resumed sequence comes as one long input; the default is 1024
        "enable_chunked_prefill": True,  # prompts may be longer than max_num_tokens
        "enable_sleep": rollout.free_cache_engine,
        "kv_cache_config": _kv_cache(config, shape, tp_size),
        "cuda_graph_config": None
        if rollout.enforce_eager
        else {"enable_padding": True, "max_batch_size": rollout.max_num_seqs},
    }


def max_model_len(config: Config) -> int:
    """Return the tokens of the longest sequence."""
    return config.data.max_prompt_length + config.data.max_response_length


def _kv_cache(config: Config, shape: ModelShape, tp_size: int) -> dict[str, Any]:
    """Return the KV cache's settings. `max_tokens` bounds the cache independently of the memory that was free when the
    engine was built, which varies with colocated training. The package uses the smaller of it and its share of free
    memory."""
    rollout = config.rollout
    blocks = -(-max_model_len(config) // TOKENS_PER_BLOCK)
    useful = rollout.max_num_seqs * blocks * TOKENS_PER_BLOCK
    share = rollout.gpu_memory_utilization
    if rollout.kv_cache_gib is not None:
        share = 1.0
        useful = min(useful, int(rollout.kv_cache_gib * GIB) // kv_bytes_per_token(shape, tp_size, ITEMSIZE))
        if useful < blocks * TOKENS_PER_BLOCK:
            raise InputError(
                f"rollout.kv_cache_gib={rollout.kv_cache_gib} holds {useful} tokens, but one sequence may have "
                f"{max_model_len(config)}; raise it"
            )
    return {
        "enable_block_reuse": rollout.enable_prefix_caching,
        "free_gpu_memory_fraction": share,
        "max_tokens": useful,
    }


def model_dir(config: Config) -> Path:
    named = config.rollout.trtllm.model_dir or config.model.path
    assert named is not None  # TensorRTLLM.check
    return Path(named)


def check_architecture(folder: Path, shape: ModelShape) -> None:
    """Raise InputError unless config.json in `folder` describes the trained model.

    The engine builds its own model from that file, and a refit detects only differences that change a shape.
    """
    in_folder = read_shape(folder)
    for key, field in ARCHITECTURE.items():
        found_value, trained_value = getattr(in_folder, field), getattr(shape, field)
        if found_value != trained_value:
            raise InputError(
                f"{folder / CONFIG} has {key}={found_value}, but the trained model has {trained_value}; make them equal"
            )
    shape.check_windows(in_folder, str(folder / CONFIG))
