"""From our configuration to the arguments of TensorRT-LLM's engine: pure, and refused early where it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcrl.config.rules import check_tensorrt_llm
from hpcrl.config.schema import Config
from hpcrl.model.hf.config_json import CONFIG, read_config, read_shape
from hpcrl.model.kv_memory import kv_bytes_per_token
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.tensorrt_llm.sampling import SAMPLER
from hpcrl.runtime.exits import InputError

TOKENS_PER_BLOCK = 32  # of its paged KV cache
ITEMSIZE = 2  # bytes: bfloat16 is the only dtype
GIB = 2**30

# A key of config.json, or what its model_type means -> the field of ModelShape that must be equal
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
    """Keyword arguments of TorchLlmArgs; those of its parts "kv_cache_config" and "cuda_graph_config" as dicts.

    Raises ConfigError or InputError for what this engine cannot do.
    """
    check_tensorrt_llm(config, tp_size)
    rollout = config.rollout
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
        "dtype": "bfloat16",
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


def _kv_cache(config: Config, shape: ModelShape, tp_size: int) -> dict[str, Any]:
    """`max_tokens` bounds the cache whatever was free when the engine was built: with colocated training that number is
    an accident. The package takes the smaller of it and of its share of the free memory."""
    rollout = config.rollout
    blocks = -(-max_model_len(config) // TOKENS_PER_BLOCK)
    useful = rollout.max_num_seqs * blocks * TOKENS_PER_BLOCK
    share = rollout.gpu_memory_utilization
    if rollout.kv_cache_gib is not None:
        share = 1.0
        useful = min(useful, int(rollout.kv_cache_gib * GIB) // kv_bytes_per_token(shape, tp_size, ITEMSIZE))
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
    assert named is not None  # check_tensorrt_llm
    return Path(named)


def check_architecture(folder: Path, shape: ModelShape) -> None:
    """Raises InputError unless config.json in `folder` describes the model that is trained: the engine builds its own
    from that file, and a refit would only notice differences that change a shape."""
    found = read_shape(folder)
    for key, field in ARCHITECTURE.items():
        theirs, ours = getattr(found, field), getattr(shape, field)
        if theirs != ours:
            raise InputError(f"{folder / CONFIG} has {key}={theirs}, and the trained model {ours}; make them equal")
    scaling = read_config(folder).get("rope_scaling")  # the shape's reader ignores it beside rope_parameters
    if scaling and shape.rope_scaling is None:
        raise InputError(f"{folder / CONFIG} has rope_scaling={scaling}, and the trained model none; remove it")
