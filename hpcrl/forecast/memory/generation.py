"""Memory of generating: an engine of frozen weights, its cache, and the pictures of prompts, which training has too.

What pictures hold on a rank is the vision tower's activations and features: it counts what autograd keeps for the
modules of transformers, which run the same operations on every device. No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from hpcrl.config.schema import EngineConfig
from hpcrl.model.blocks.micro_batch import FP32, INT64
from hpcrl.model.params import engine_layout, quantized_names, shards
from hpcrl.model.shape import ModelShape
from hpcrl.model.vision import Vision
from hpcrl.rollout.engines.engine import PlannedCache
from hpcrl.runtime.layout import Layout

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class PicturePass:
    """The pictures of a micro-batch.

    itemsize: bytes of a weight or an activation. tokens: placeholders of all pictures. patches: of the pictures that
    this rank's tower runs on, 0 if features are given. num_ranks: ranks that divide the pictures. num_parts: parts into
    which sequence parallelism divides the tokens.
    """

    vision: Vision
    itemsize: int
    tokens: int
    patches: int = 0
    num_ranks: int = 1
    num_parts: int = 1

    def inputs(self, *, on_gpu: bool) -> int:
        """Places of the tokens; without a GPU, patches or features too, which are in host memory."""
        width = self.vision.merge_size**2 * self.vision.patch_width if self.patches else self.vision.feature_width
        return self.tokens * (2 * INT64 + (0 if on_gpu else width * FP32))

    def embedding(self, hidden: int, *, on_gpu: bool, trains: bool = False) -> int:
        """Peak before the first layer, besides the embeddings: the tower's, or that of joining features and embeddings,
        `hidden` bytes. Several ranks gather the features, then put them into order."""
        if self.patches:
            encoding = self._forward_to_train if trains else self.forward
            given = self.features * (2 if self.num_ranks > 1 else 1)
        else:  # in fp32
            encoding, cast = 0, self.features if self.itemsize < FP32 else 0
            given = cast + (self.features * FP32 // self.itemsize if on_gpu else 0)
        return max(encoding, given + self.features // self.num_parts + hidden)

    @property
    def features(self) -> int:
        """Bytes of the features of all pictures."""
        return self.tokens * self.vision.feature_width * self.itemsize

    @property
    def deepstack(self) -> int:
        """Bytes of features until the first layers have added their part."""
        return self.features // self.num_parts if self.vision.num_deepstack else 0

    @property
    def kept(self) -> int:
        """The tower's bytes between the forward and the backward pass."""
        return self.patches * (self._kept_of_blocks() + self._kept_of_mergers())

    @property
    def forward(self) -> int:
        """The tower's peak without gradients, in the attention or the MLP of a block."""
        hidden, ffn, itemsize = self._hidden, int(self.vision.tower["intermediate_size"]), self.itemsize
        in_fp32 = 4 * hidden * FP32 + (2 * hidden * FP32 if itemsize < FP32 else 0)  # rotary embedding
        attention = max(10 * hidden * itemsize, 5 * hidden * itemsize + in_fp32)
        mlp = 3 * hidden * itemsize + (2 if self._is_qwen3 else 3) * ffn * itemsize
        inputs = self.vision.patch_width * (FP32 + (itemsize if itemsize < FP32 else 0))
        learned = hidden * FP32 + 4 * (INT64 + FP32) if self._is_qwen3 else 0  # position embeddings
        deepstack = self.vision.num_deepstack * self.vision.hidden_size * itemsize // self.vision.merge_size**2
        return self.patches * (inputs + learned + self._rotary + 2 * INT64 + deepstack + max(attention, mlp))

    @property
    def _forward_to_train(self) -> int:
        """The tower's peak if a backward pass follows."""
        finished = self.kept + self.patches * self.vision.feature_width * self.itemsize // self.vision.merge_size**2
        if self.vision.train in ("tower", "all"):
            return finished
        return max(finished, self.forward + self.patches * (self._kept_of_mergers() - self._kept_of_last()))

    @property
    def backward(self) -> int:
        """Bytes besides what is kept in the backward pass of a merger, at its end: gradients of its largest weight, of
        its input and of its output."""
        merged = self._hidden * self.vision.merge_size**2
        return (merged**2 + 2 * self.patches * self._hidden) * self.itemsize if self.kept else 0

    @property
    def _is_qwen3(self) -> bool:
        return self.vision.mrope_interleaved

    @property
    def _hidden(self) -> int:
        return int(self.vision.tower["hidden_size"])

    @property
    def _rotary(self) -> int:
        """Cosines and sines of a patch."""
        return 2 * self._hidden // int(self.vision.tower["num_heads"]) * FP32

    def _kept_of_blocks(self) -> int:
        """Bytes of a patch. Attention: projection, queries and keys, outputs of each picture and joined, logarithmic
        sums. MLP: projections, activation, product."""
        if self.vision.train not in ("tower", "all"):
            return 0
        tower, itemsize = self.vision.tower, self.itemsize
        attention = 7 * self._hidden * itemsize + int(tower["num_heads"]) * FP32
        mlp = (2 if self._is_qwen3 else 4) * int(tower["intermediate_size"]) * itemsize
        block = attention + mlp + 2 * self._norm(has_weight=True)
        learned = 4 * (INT64 + FP32) if self._is_qwen3 else 0
        return self.vision.patch_width * itemsize + learned + self._rotary + int(tower["depth"]) * block

    def _norm(self, *, has_weight: bool) -> int:
        """Bytes of a patch: input and output; Qwen2.5-VL's RMSNorm keeps its input in fp32, and the normalised input
        too.

        Args:
            has_weight: whether its weight and the next are trained; otherwise only the input is kept.
        """
        hidden, itemsize = self._hidden, self.itemsize
        if self._is_qwen3:
            return hidden * itemsize * (2 if has_weight else 1) + 2 * FP32
        return hidden * (FP32 + (2 * itemsize if has_weight else 0)) + FP32

    def _kept_of_mergers(self) -> int:
        """Bytes of a patch in all mergers, whose hidden states are as wide as the patches of a token. The inputs of
        those of deepstack are kept by blocks, if these are trained."""
        hidden, train = self._hidden * self.itemsize, self.vision.train
        each = {"none": 0, "merger": self._kept_of_last(), "tower": hidden, "all": 3 * hidden}[train]
        return self._kept_of_last() + self.vision.num_deepstack * each

    def _kept_of_last(self) -> int:
        """Bytes of a patch in the last merger: norm, and input and output of the activation."""
        train, hidden = self.vision.train, self._hidden * self.itemsize
        if train == "none":
            return 0
        if train == "tower":
            return self._norm(has_weight=False) + hidden
        has_no_gradient = train == "merger" and not self._is_qwen3  # RMSNorm's input
        return self._norm(has_weight=True) + 2 * hidden - has_no_gradient * self._hidden * FP32


@dataclass(frozen=True)
class EngineMemory:
    """A generation engine on one of its ranks. longest: tokens of a sequence. quantization and
    kv_cache_dtype: as in the config."""

    cfg: EngineConfig
    shape: ModelShape
    layout: Layout
    itemsize: int
    longest: int
    quantization: str | None = None
    kv_cache_dtype: str = "auto"

    @cached_property
    def weights(self) -> int:
        """Bytes of the weights."""
        own = shards(self.shape, engine_layout(self.shape, self.layout.tp))
        return sum(math.prod(shard.local_shape) for shard in own) * self.itemsize - self.saved

    @cached_property
    def quantized(self) -> list[tuple[int, ...]]:
        """Sizes of the matrices that have 8-bit numbers, and a scale for each row."""
        names = quantized_names(self.shape, self.quantization)
        own = shards(self.shape, engine_layout(self.shape, self.layout.tp)) if names else ()
        return [shard.local_shape for shard in own if shard.name in names]

    @property
    def saved(self) -> int:
        """Bytes that 8-bit numbers save."""
        return sum(rows * cols * (self.itemsize - 1) - rows * FP32 for rows, cols in self.quantized)

    @property
    def cache(self) -> PlannedCache:
        itemsize = 1 if self.kv_cache_dtype == "fp8" else self.itemsize
        return PlannedCache(self.cfg, self.shape, self.layout.tp, itemsize, self.longest)

    def work(self) -> tuple[int, int]:
        """Return an estimate of two sizes in bytes: the activations of a prefill, and the logits of all running
        sequences over the whole vocabulary with what sampling makes of them."""
        cfg, shape, itemsize = self.cfg, self.shape, self.itemsize
        tokens = max(cfg.max_num_batched_tokens, cfg.max_num_seqs)
        # Most layers are like the last one with an MLP.
        width = next((it.mlp.inner_width for it in reversed(shape.layers) if it.mlp.inner_width), 0)
        activations = tokens * itemsize * (3 * shape.hidden_size + 4 * width // self.layout.tp)
        # A matrix that is dequantised for a product, where there are no 8-bit products.
        activations += max((rows * cols * itemsize for rows, cols in self.quantized), default=0)
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
