"""Memory of a generation engine of frozen weights, of generating, and of encoding the pictures of prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from hpcrl.config.schema import EngineConfig, JudgeConfig
from hpcrl.forecast.memory.tower import FP32, PicturePass
from hpcrl.model.params import engine_layout, shards
from hpcrl.model.shape import ModelShape
from hpcrl.model.vision import Vision
from hpcrl.rollout.engines.native.cache_layout import max_kv_bytes
from hpcrl.runtime.layout import Layout

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
        own = shards(self.shape, engine_layout(self.shape, self.layout.tp))
        return sum(math.prod(shard.local_shape) for shard in own) * self.itemsize

    def kv_cache(self, free: int | None) -> int:
        """See `native_kv_cache`."""
        longest = self.cfg.max_prompt_length + self.cfg.max_response_length
        return native_kv_cache(self.cfg, self.shape, self.layout.tp, self.itemsize, longest, free)

    def work(self) -> tuple[int, int]:
        return generation_work(self.cfg, self.shape, self.layout.tp, self.itemsize)


def native_kv_cache(
    cfg: EngineConfig, shape: ModelShape, tp: int, itemsize: int, longest: int, free: int | None
) -> int:
    """Bytes of a rank's KV cache, in which at least one sequence of `longest` tokens has to fit. free: bytes that are
    left when the engine is built, its weights included; None: any."""
    if cfg.kv_cache_gib is not None:
        return int(cfg.kv_cache_gib * GIB)
    least, most = (max_kv_bytes(shape, tp, itemsize, n, longest) for n in (1, cfg.max_num_seqs))
    return most if free is None else max(least, min(most, int(free * cfg.gpu_memory_utilization)))


def generation_work(cfg: EngineConfig, shape: ModelShape, tp: int, itemsize: int) -> tuple[int, int]:
    """Bytes of the activations of a prefill, and of the logits of all running sequences over the whole vocabulary with
    what sampling makes of them; an estimate."""
    tokens = max(cfg.max_num_batched_tokens, cfg.max_num_seqs)
    width = shape.num_experts and shape.moe_topk * shape.moe_ffn_hidden_size or shape.ffn_hidden_size
    activations = tokens * itemsize * (3 * shape.hidden_size + 4 * width // tp)
    return activations, cfg.max_num_seqs * shape.padded_vocab_size * (2 * itemsize + 4 + 2 * 8)


def encoding_work(
    cfg: EngineConfig, vision: Vision, tp: int, itemsize: int, num_prompts: int, prompt_tokens: int
) -> int:
    """Peak bytes of encoding the pictures of so many prompts, which fill them. As many patches as a prefill has tokens
    for are on the device at a time, and a frozen tower encodes one picture of them after the other; the features are
    gathered from all ranks, put into order, and converted to fp32."""
    mine, of_token = math.ceil(num_prompts / tp) * prompt_tokens, vision.feature_width * itemsize
    share = min(mine, max(prompt_tokens, cfg.max_num_batched_tokens))
    at_once = prompt_tokens if vision.train == "none" else share
    waiting = (share - at_once) * vision.merge_size**2 * vision.patch_width * FP32
    last_pass = PicturePass(vision, itemsize, at_once, at_once * vision.merge_size**2).forward
    whole, own = num_prompts * prompt_tokens * of_token, mine * of_token
    gathered = own + tp * own if tp > 1 else 0
    return max((mine - at_once) * of_token + waiting + last_pass, whole + max(gathered, whole * FP32 // itemsize))
