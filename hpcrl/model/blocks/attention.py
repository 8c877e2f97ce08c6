"""Attention over heads, grouped-query attention, and what their rotary embedding is. No torch; modules are in
`attention_modules`, angles in `rope_angles`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from hpcrl.model.blocks.block import Block, CachedHeads, Feature, Projection, Weight
from hpcrl.model.blocks.micro_batch import FP32, Collective, Computation, Held, Launches, MicroBatch
from hpcrl.model.blocks.norms import norm_module, norm_weight

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from torch import Tensor

    from hpcrl.model.blocks.attention_modules import AttentionStep, Linear
    from hpcrl.model.exact import TensorParallel
    from hpcrl.runtime.groups import RoleGroups


ATTENTION = Launches(68, 172, 47, 10)  # with the norms and sums of the layer
HEAD_NORM = Launches(10, 56, 8, 1)


@dataclass(frozen=True)
class RopeScaling:
    """How a rotary embedding is extended beyond the sequence length of the first training; names are those of
    config.json, formulas are in `hpcrl.model.blocks.rope_angles`."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position_embeddings: int = 0  # of "llama3" and "yarn"
    low_freq_factor: float = 1.0  # of "llama3"
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # of "yarn"
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # of the embedding
    mscale_all_dim: float = 0.0  # of DeepSeek's "yarn": sharpens the softmax, see ModelShape.softmax_scale
    truncate: bool = field(default=True, repr=False)  # of "yarn": whether the bounds of its ramp are whole dimensions


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of a layer's queries and keys: of the first `dim` numbers of a head, with the base `theta`.

    With `axes` a token of a picture has several positions, and frequency i turns with that of axis `axes[i]`.
    """

    dim: int
    theta: float
    scaling: RopeScaling | None = None
    axes: tuple[int, ...] | None = None


class Heads(NamedTuple):
    """The heads of a model, and their widths. `has_norm` says whether queries and keys have an RMSNorm, and `has_gate`
    whether the output has a gate, which the projection of the queries computes. has_sinks: see `Attention`."""

    queries: int
    groups: int
    key_dim: int
    value_dim: int
    has_norm: bool = False
    has_gate: bool = False
    has_sinks: bool = False


@dataclass(frozen=True)
class HeadsBlock(Block):
    """Causal attention over packed sequences, as `hpcrl.model.blocks.attention_modules.PackedAttention` computes it."""

    rope: Rope | None  # of queries and keys; None: none

    recomputed: ClassVar[Literal["core_attn", "mlp", "moe", ""]] = "core_attn"

    @property
    def heads(self) -> Heads:
        raise NotImplementedError

    def projected(self, tp: int) -> int:
        """Return the numbers of a token that a rank's projections compute before attention."""
        query, key = self._widths(tp)
        return (1 + self.heads.has_gate) * query + 2 * key

    def _widths(self, tp: int) -> tuple[int, int]:
        """Return the numbers of a token in the queries and in the keys of a rank."""
        heads = self.heads
        return heads.queries // tp * heads.key_dim, heads.groups // tp * heads.key_dim

    def inputs(self) -> dict[str, int]:
        return {f"angles of {self.rope}": self.rope.dim * FP32} if self.rope is not None else {}

    def held(self, batch: MicroBatch) -> Held:
        """Return what is held; of a recomputed block queries, keys and values, and the output."""
        inputs = batch.tokens * 2 * sum(self._widths(batch.layout.tp)) * batch.itemsize
        return Held(self._kept(batch), self._peak(batch), inputs)

    def _kept(self, batch: MicroBatch) -> int:
        """Return the bytes of queries, keys, values, output and its logarithmic sums, and of the packed output. Context
        parallelism adds keys and values of other ranks."""
        heads, tp, itemsize = self.heads, batch.layout.tp, batch.itemsize
        (query, key), queries = self._widths(tp), heads.queries // tp
        # Values are padded until the output is packed.
        total = batch.tokens * ((2 * query + 2 * key + queries * heads.value_dim) * itemsize + queries * FP32)
        for queried, seen in tails(batch):
            total += seen * (2 * key + (0 if batch.on_gpu else queried)) * itemsize  # the CPU has a mask
        if heads.has_norm:
            # The inputs are parts of the projection's output, which stays whole, and a copy of queries that lie apart.
            copies = batch.norm_copies * (query + key) * FP32
            apart = query if heads.queries > heads.groups else 0
            inside = (query + 2 * key + apart) * itemsize if batch.norm_keeps_input else copies
            total += batch.tokens * (inside + (queries + heads.groups // tp) * FP32)
        if heads.has_sinks:  # one more number of each head; a window's parts have copies of keys and values
            copies = 2 * (queries + heads.groups // tp) + (0 if self.sees is None else 4 * key)
            total += batch.tokens * copies * itemsize
        if heads.has_gate:  # the gate, its sigmoid, and the gated output
            total += batch.tokens * 3 * queries * heads.value_dim * itemsize
        return total

    def _peak(self, batch: MicroBatch) -> int:
        """Return the most bytes, with the output of the projections. In bf16 the CPU's norm of queries has four copies
        of them in fp32."""
        heads, layout, tokens = self.heads, batch.layout, batch.tokens
        query, key = self._widths(layout.tp)
        norm = 4 * tokens * query * FP32 if heads.has_norm and not batch.norm_keeps_input else 0
        inside = tokens * (3 * query + 2 * key)
        if not batch.on_gpu and layout.cp == 1 and heads.value_dim == heads.key_dim:
            # The rotation in steps, and copies of padded sequences.
            more = 3 * query if heads.has_sinks else query // 2 if heads.has_norm else 0
            inside += tokens * (2 * query + key + more)
        if heads.value_dim < heads.key_dim:
            inside += tokens * heads.queries // layout.tp * heads.value_dim  # the packed output
        if layout.cp > 1:
            queried, seen = max(tails(batch), default=(0, 0))
            inside += 2 * key * ((layout.cp + 2) * tokens + seen) + tokens * query
            inside += (tokens * (query + key) if heads.has_norm else 0) + (0 if batch.on_gpu else queried * seen)
        gathered = batch.gathered(self.hidden_size) if batch.lora is not None else 0
        return tokens * self.projected(layout.tp) * batch.itemsize + max(norm, inside * batch.itemsize) + gathered

    def computation(self, batch: MicroBatch) -> Computation:
        """Return the computation. The rotary embedding is elementwise. Context-parallel ranks gather keys and values,
        and their gradients are scattered."""
        heads, layout, linear = self.heads, batch.layout, super().computation(batch)
        width, rotated = heads.key_dim + heads.value_dim, (heads.queries + heads.groups) * heads.key_dim
        of_pair = heads.queries / layout.tp * width
        gathered = batch.tokens * layout.cp * (heads.groups / layout.tp * width)
        keys = Collective("all_gather", gathered * batch.itemsize, ("cp",))
        return linear._replace(
            elementwise=2 * (rotated / layout.tp) + 3 * heads.has_gate * heads.queries * heads.value_dim / layout.tp,
            pair_width=of_pair,
            sees=self.sees,
            decode_width=of_pair,
            cached_width=-(-heads.groups // layout.tp) * width,
            exchanges=(keys,) if layout.cp > 1 else (),
            launches=((ATTENTION, 1), (HEAD_NORM, heads.has_norm)),
        )


def tails(batch: MicroBatch) -> list[tuple[int, int]]:
    """Return the queries of sequences that began in an earlier chunk, and their keys, on the context-parallel rank with
    most of them (see `hpcrl.model.gpt`)."""
    cp, length = batch.layout.cp, batch.longest
    if cp == 1:
        return []
    chunk = batch.tokens // 2
    cut = [start % length for start in range(0, 2 * cp * chunk, chunk)]
    found = [(min(chunk, length - before), before + min(chunk, length - before)) for before in cut]
    of_ranks = [[found[place] for place in (rank, 2 * cp - 1 - rank) if cut[place]] for rank in range(cp)]
    return max(of_ranks, key=lambda tails: sum(queries * keys for queries, keys in tails))


@dataclass(frozen=True)
class Attention(HeadsBlock):
    """Causal attention with rotary embedding (Ainslie et al. 2023, arXiv:2305.13245).

    qk_norm: RMSNorm of queries and keys, of each head or of all heads together. window: a token attends to itself and
    the tokens before it, so many in all (Beltagy et al. 2020, arXiv:2004.05150, section 3.1); None: to all. has_gate:
    the output is multiplied by the sigmoid of a gate, whose rows follow those of each query head (Qiu et al. 2025,
    arXiv:2505.06708). softmax_scale: factor of the products of queries and keys; None: 1 / sqrt(head_dim). has_sinks:
    the softmax has one more score, a number of each query head that is trained, whose value is 0 (Agarwal et al. 2025,
    arXiv:2508.10925, section 2.3).
    """

    num_heads: int
    num_groups: int
    head_dim: int
    qkv_bias: bool = False
    qk_norm: Literal["", "head", "all"] = ""
    window: int | None = None
    zero_centered: bool = False  # the norms of queries and keys, see `hpcrl.model.blocks.norms.Norms`
    has_gate: bool = False
    softmax_scale: float | None = None
    has_output_bias: bool = False
    has_sinks: bool = False

    title: ClassVar[str] = "attention"

    @property
    def is_common(self) -> bool:
        """Whether it is that of Llama, Qwen2 and Qwen3, or differs in its window and the form of its norms; kernels and
        other engines have it."""
        plain = Attention(self.hidden_size, self.rope, self.num_heads, self.num_groups, self.head_dim)
        same = ("qkv_bias", "qk_norm", "window", "zero_centered")
        is_plain = replace(plain, **{name: getattr(self, name) for name in same}) == self
        return is_plain and self.qk_norm != "all" and self.rope is not None and self.rope.dim == self.head_dim

    @property
    def supports(self) -> frozenset[Feature]:
        found: set[Feature] = {"adapters", "context_parallel", "planned_cp"}
        if (self.is_common or self.qk_norm == "head") and not self.has_output_bias:
            found |= {"transformer_engine", "fp8"}
        others = self.has_gate, self.has_sinks, self.has_output_bias
        if self.window is None and not any(others) and self.qk_norm != "all" and self.softmax_scale is None:
            found.add("exact")
        return frozenset(found)

    @property
    def sees(self) -> int | None:
        return self.window

    @property
    def num_rows(self) -> int:
        """Rows of the weight of queries, keys and values."""
        return ((1 + self.has_gate) * self.num_heads + 2 * self.num_groups) * self.head_dim

    @property
    def heads(self) -> Heads:
        width, flags = self.head_dim, (bool(self.qk_norm), self.has_gate, self.has_sinks)
        return Heads(self.num_heads, self.num_groups, width, width, *flags)

    def weights(self) -> Iterator[Weight]:
        width, per_group = self.head_dim, self.num_heads // self.num_groups
        projections = (
            Projection("q_proj", (1 + self.has_gate) * per_group * width),
            Projection("k_proj", width),
            Projection("v_proj", width),
        )
        qkv, rows = "self_attention.linear_qkv", self.num_rows
        yield Weight(f"{qkv}.weight", (rows, self.hidden_size), "rows", projections, self.num_groups)
        if self.qkv_bias:
            yield Weight(f"{qkv}.bias", (rows,), "rows", projections, self.num_groups)
        for head, number in (("q", self.num_heads), ("k", self.num_groups)) if self.qk_norm else ():
            name = f"self_attention.{head}_layernorm"
            if self.qk_norm == "all":
                yield replace(norm_weight(name, number * width, self.zero_centered), cut="rows")
            else:
                yield norm_weight(name, width, self.zero_centered)
        if self.has_sinks:
            yield Weight("self_attention.core_attention.softmax_offset", (self.num_heads,), "rows", initial=0.0)
        yield output_projection(self.hidden_size, self.num_heads * width)
        if self.has_output_bias:
            yield Weight("self_attention.linear_proj.bias", (self.hidden_size,))

    def divided(self) -> dict[str, int]:
        return {"num_query_groups": self.num_groups}

    def settings(self) -> dict[str, Any]:
        return {
            "num_attention_heads": self.num_heads,
            "num_query_groups": self.num_groups,
            "kv_channels": self.head_dim,
            "add_qkv_bias": self.qkv_bias,
            "qk_layernorm": bool(self.qk_norm),
            "attention_output_gate": self.has_gate,
            **({"softmax_scale": self.softmax_scale} if self.softmax_scale is not None else {}),
        }

    def use(self, spec: ModuleSpec, groups: RoleGroups, *, exact: bool) -> None:
        from hpcrl.model.blocks.attention_modules import ExactPackedAttention, GatedAttention, PackedAttention
        from hpcrl.model.blocks.layers import BiasedRowParallel, SplitRMSNorm

        attention = spec.submodules.self_attention.submodules
        core = ExactPackedAttention if exact else PackedAttention
        num_sinks = self.num_heads // groups.layout.tp if self.has_sinks else 0
        attention.core_attention = partial(core, rope=self.rope, window=self.window, num_sinks=num_sinks)
        if self.has_output_bias:
            attention.linear_proj = BiasedRowParallel
        if self.has_gate:
            spec.submodules.self_attention.module = GatedAttention
        if self.qk_norm == "all":
            shared = {"tp_group": groups.pgc.tp, "zero_centered": self.zero_centered}
            attention.q_layernorm, attention.k_layernorm = (
                type("HeadsNorm", (SplitRMSNorm,), {**shared, "width": number * self.head_dim})
                for number in (self.num_heads, self.num_groups)
            )
        elif self.qk_norm:
            attention.q_layernorm = attention.k_layernorm = norm_module(self.zero_centered)

    def cached(self, tp_size: int) -> CachedHeads:
        groups, width = self.num_groups // tp_size, self.head_dim
        return CachedHeads(groups, self.num_heads // self.num_groups, width, width, window=self.window)

    def step(self, weight: Callable[[str], Tensor], linear: Linear, eps: float, tp: TensorParallel) -> AttentionStep:
        from hpcrl.model.blocks.attention_modules import AttentionStep

        return AttentionStep(self, weight, linear, eps, tp)


def output_projection(hidden_size: int, attended: int) -> Weight:
    """The projection of all heads' outputs, `attended` numbers, to the hidden state."""
    name = "self_attention.linear_proj.weight"
    return Weight(name, (hidden_size, attended), "cols", (Projection("o_proj", hidden_size),))
