"""From our configuration to the arguments of TensorRT-LLM's engine: pure, and refused early where it cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpcrl.config.schema import Config
from hpcrl.launch.exits import InputError
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.tensorrt_llm.sampling import SAMPLER

TOKENS_PER_BLOCK = 32  # of its paged KV cache
ITEMSIZE = 2  # bytes: bfloat16 is the only dtype
GIB = 2**30

# A key of a Llama-like config.json -> the field of ModelShape that must be equal
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
}


def engine_arguments(config: Config, shape: ModelShape, tp_size: int) -> dict[str, Any]:
    """Keyword arguments of TorchLlmArgs; those of its parts "kv_cache_config" and "cuda_graph_config" as dicts.

    Raises InputError for what this engine cannot do.
    """
    rollout = config.rollout
    dtype = rollout.dtype or config.model.dtype
    if dtype != "bfloat16":
        raise InputError(
            f"rollout.engine=tensorrt_llm computes in bfloat16, and rollout.dtype={dtype}; "
            "set rollout.dtype=bfloat16, or rollout.engine=native"
        )
    if rollout.exact:
        raise InputError("rollout.exact is for engine=native, and rollout.engine=tensorrt_llm; change one")
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        raise InputError(
            f"rollout.max_num_batched_tokens={rollout.max_num_batched_tokens} is less than "
            f"rollout.max_num_seqs={rollout.max_num_seqs}, and TensorRT-LLM counts one token of each sequence that "
            "decodes; raise it, or lower max_num_seqs"
        )
    longest = max_model_len(config)
    if longest > shape.max_position_embeddings:
        raise InputError(
            f"data.max_prompt_length + data.max_response_length={longest} is more than "
            f"model.max_position_embeddings={shape.max_position_embeddings}; shorten one of them"
        )
    return {
        "model": str(model_dir(config)),
        "skip_tokenizer_init": True,
        "load_format": "dummy",  # refit brings the weights
        "dtype": dtype,
        "tensor_parallel_size": tp_size,
        "pipeline_parallel_size": 1,
        "allreduce_strategy": "NCCL",  # its own all-reduce goes wrong with several engines in a job, as its makers say
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
    """Tokens of the longest sequence."""
    return config.data.max_prompt_length + config.data.max_response_length


def kv_bytes_per_token(shape: ModelShape, tp_size: int) -> int:
    """Bytes of a token's keys and values on one rank."""
    heads = -(-shape.num_query_groups // tp_size)
    return 2 * shape.num_layers * heads * shape.head_dim * ITEMSIZE


def _kv_cache(config: Config, shape: ModelShape, tp_size: int) -> dict[str, Any]:
    """`max_tokens` bounds the cache whatever was free when the engine was built: with colocated training that number is
    an accident. The package takes the smaller of it and of its share of the free memory."""
    rollout = config.rollout
    blocks = -(-max_model_len(config) // TOKENS_PER_BLOCK)
    useful = rollout.max_num_seqs * blocks * TOKENS_PER_BLOCK
    share = rollout.gpu_memory_utilization
    if rollout.kv_cache_gib is not None:
        share = 1.0
        useful = min(useful, int(rollout.kv_cache_gib * GIB) // kv_bytes_per_token(shape, tp_size))
        if useful < blocks * TOKENS_PER_BLOCK:
            raise InputError(
                f"rollout.kv_cache_gib={rollout.kv_cache_gib} holds {useful} tokens, and one sequence may have "
                f"{max_model_len(config)}; raise it"
            )
    return {
        "enable_block_reuse": rollout.enable_prefix_caching,
        "free_gpu_memory_fraction": share,
        "max_tokens": useful,
    }


def model_dir(config: Config) -> Path:
    named = config.rollout.trtllm.model_dir or config.model.path
    if named is None:
        raise InputError(
            "rollout.engine=tensorrt_llm reads config.json of a Hugging Face directory, and neither "
            "rollout.trtllm.model_dir nor model.path names one; name it"
        )
    return Path(named)


def check_architecture(folder: Path, shape: ModelShape) -> None:
    """Raises InputError unless config.json in `folder` describes the model that is trained: the engine builds its own
    from that file, and a refit would only notice differences that change a shape."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}); it must describe the model that is trained") from error
    heads = found.get("num_attention_heads")
    defaults = {
        "num_key_value_heads": heads,
        "head_dim": found.get("hidden_size", 0) // heads if heads else None,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    }
    for key, field in ARCHITECTURE.items():
        theirs = found.get(key)
        theirs = defaults.get(key) if theirs is None else theirs
        ours = getattr(shape, field)
        if theirs != ours:
            raise InputError(f"{path} has {key}={theirs}, and the trained model {ours}; make them equal")
    if found.get("rope_scaling"):
        raise InputError(f"{path} has rope_scaling={found['rope_scaling']}, and the trained model none; remove it")
