"""What TensorRT-LLM declares. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcrl.config.engines import register_engine
from hpcrl.config.yaml_core import ConfigError
from hpcrl.rollout.engines.cache_layout import BLOCK_SIZE, blocks_for
from hpcrl.rollout.engines.engine import Engine
from hpcrl.rollout.engines.fused_shards import check_layout, fused_shards
from hpcrl.rollout.engines.tensorrt_llm.cache_layout import kv_bytes_per_token
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcrl.config.schema import Config
    from hpcrl.model.params import Shard
    from hpcrl.model.shape import ModelShape
    from hpcrl.rollout.engines.cache_layout import PlannedCache
    from hpcrl.rollout.protocol import RolloutEngine
    from hpcrl.runtime.groups import RoleGroups

TOP_K = 1024  # its sampler takes larger ones for this, and only warns


def check_model(shape: ModelShape, tp: int) -> None:
    """Raise InputError if the engine does not support the model, or if its layout of it is unknown."""
    check_layout(shape, tp, "tensorrt_llm")
    if shape.softmax_size < shape.vocab_size:
        raise InputError(
            f"rollout.engine=tensorrt_llm draws from all {shape.vocab_size} ids of the model, and the tokenizer has "
            f"{shape.softmax_size}; use engine=native, or model.softmax_vocab=config, with which all ids are trained on"
        )


@register_engine("tensorrt_llm")
class TensorRTLLM(Engine):
    verl_name = "trtllm"
    has_own_layout = True
    expandable_segments = False  # its sleep mode uses memory pools, which torch 2.9 cannot make from such segments

    def shards(self, shape: ModelShape, rank: int, ranks: int) -> list[Shard]:
        """Names and shapes are those of the unquantized parameters of a Llama-like model in version 1.2; they have not
        been compared on a GPU yet. The vocabulary is padded to a multiple of the ranks only; rows of padding stay 0."""
        check_model(shape, ranks)
        return list(fused_shards(shape, rank, ranks, -(-shape.vocab_size // ranks)))

    def check(self, config: Config, tp: int) -> None:
        trtllm = config.rollout.trtllm
        if trtllm.model_dir is None and config.model.path is None:
            raise ConfigError(
                "rollout.engine=tensorrt_llm reads config.json of a Hugging Face directory, and "
                "rollout.trtllm.model_dir is null; name one there"
            )
        if trtllm.design == "single_process" and tp > 1:
            raise ConfigError(
                f"rollout.trtllm.design=single_process makes replicas of one rank, and placement.rollout.tp={tp}; "
                "use tp: 1, or design: tp_group"
            )
        dtype = config.rollout.dtype or config.model.dtype
        if dtype != "bfloat16":
            raise ConfigError(
                f"rollout.engine=tensorrt_llm is run in bfloat16, and the engine's dtype would be {dtype}; "
                "set rollout.dtype=bfloat16, or use rollout.engine=native"
            )
        if config.rollout.max_num_batched_tokens < config.rollout.max_num_seqs:
            raise ConfigError(
                f"rollout.max_num_batched_tokens={config.rollout.max_num_batched_tokens} is less than "
                f"rollout.max_num_seqs={config.rollout.max_num_seqs}, and TensorRT-LLM decodes all of them in one "
                "call; raise it, or lower max_num_seqs"
            )
        ways = {"rollout": config.rollout.top_k}
        ways |= {f"rollout.val_kwargs (n={way.n})": way.top_k for way in config.rollout.val_kwargs}
        for section, top_k in ways.items():
            if top_k > TOP_K:
                raise ConfigError(
                    f"{section}: top_k={top_k} is more than TensorRT-LLM's sampler keeps; use {TOP_K} or less, or -1"
                )

    def start(self, comm: MPI.Intracomm) -> None:
        from hpcrl.rollout.engines.tensorrt_llm.start import import_on_all_ranks

        import_on_all_ranks(comm)

    def cache_bytes(self, cache: PlannedCache, capacity: int | None, taken: int, weights: int) -> int:
        cfg, per_token = cache.cfg, kv_bytes_per_token(cache.shape, cache.tp, cache.itemsize)
        least = blocks_for(cache.longest) * BLOCK_SIZE * per_token
        most = cfg.max_num_seqs * least
        if cfg.kv_cache_gib is not None:
            return min(int(cfg.kv_cache_gib * 2**30), most)
        if capacity is None:
            return most
        return max(least, min(most, int(max(0, capacity - taken - weights) * cfg.gpu_memory_utilization)))

    def make(self, groups: RoleGroups, shape: ModelShape, config: Config, *, ranks_on_node: int) -> RolloutEngine:
        from hpcrl.rollout.engines.tensorrt_llm.engine import make_engine
        from hpcrl.runtime import platform

        return make_engine(config, shape, groups, platform.device())
