"""Memory of a generation engine of frozen weights, and of generating."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from hpcrl.config.schema import JudgeConfig, RolloutConfig
from hpcrl.grid.layout import Layout
from hpcrl.model.params import shards
from hpcrl.model.shape import ModelShape
from hpcrl.model.sizes import max_kv_bytes

GIB = 2**30


@dataclass(frozen=True)
class JudgeEngine:
    """The judge's native engine on one of its ranks."""

    cfg: JudgeConfig
    shape: ModelShape
    layout: Layout
    itemsize: int

    @cached_property
    def weights(self) -> int:
        """Bytes of the weights."""
        tp = self.layout.tp
        layout = Layout(tuple(range(tp)), tp=tp, etp=tp if self.shape.num_experts else 1)
        return sum(math.prod(shard.local_shape) for shard in shards(self.shape, layout)) * self.itemsize

    def kv_cache(self, free: int | None) -> int:
        """Bytes of the KV cache, of which at least one sequence has to fit. free: bytes that are left when the engine
        is built, its weights included; None: any."""
        cfg, tp = self.cfg, self.layout.tp
        if cfg.kv_cache_gib is not None:
            return int(cfg.kv_cache_gib * GIB)
        longest = cfg.max_prompt_length + cfg.max_response_length
        least, most = (max_kv_bytes(self.shape, tp, self.itemsize, n, longest) for n in (1, cfg.max_num_seqs))
        return most if free is None else max(least, min(most, int(free * cfg.gpu_memory_utilization)))

    def work(self) -> tuple[int, int]:
        return generation_work(self.cfg, self.shape, self.layout.tp, self.itemsize)


def generation_work(cfg: RolloutConfig | JudgeConfig, shape: ModelShape, tp: int, itemsize: int) -> tuple[int, int]:
    """Bytes of the activations of a prefill, and of the logits of all running sequences over the whole vocabulary with
    what sampling makes of them; an estimate."""
    tokens = max(cfg.max_num_batched_tokens, cfg.max_num_seqs)
    width = shape.num_experts and shape.moe_topk * shape.moe_ffn_hidden_size or shape.ffn_hidden_size
    activations = tokens * itemsize * (3 * shape.hidden_size + 4 * width // tp)
    return activations, cfg.max_num_seqs * shape.padded_vocab_size * (2 * itemsize + 4 + 2 * 8)
