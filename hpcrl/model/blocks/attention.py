"""Grouped-query attention. No torch; modules are in `attention_modules`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from hpcrl.model.blocks.block import CachedHeads, Feature, Projection, Weight
from hpcrl.model.blocks.heads import Heads, HeadsBlock

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from torch import Tensor

    from hpcrl.model.blocks.attention_modules import AttentionStep, Linear
    from hpcrl.runtime.groups import RoleGroups


@dataclass(frozen=True)
class Attention(HeadsBlock):
    """Causal attention with rotary embedding (Ainslie et al. 2023, arXiv:2305.13245). qk_norm: RMSNorm of each query
    and key head. window: a token attends to itself and the tokens before it, so many in all (Beltagy et al. 2020,
    arXiv:2004.05150, section 3.1); None: to all."""

    num_heads: int
    num_groups: int
    head_dim: int
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int | None = None

    title: ClassVar[str] = "attention"

    @property
    def supports(self) -> frozenset[Feature]:
        found: tuple[Feature, ...] = ("adapters", "transformer_engine", "fp8", "planned_cp")
        return frozenset(found if self.window is not None else (*found, "exact", "tensorrt_llm"))

    @property
    def sees(self) -> int | None:
        return self.window

    @property
    def num_rows(self) -> int:
        """Rows of the weight of queries, keys and values."""
        return (self.num_heads + 2 * self.num_groups) * self.head_dim

    @property
    def heads(self) -> Heads:
        width = self.head_dim
        return Heads(self.num_heads, self.num_groups, width, width, width, self.qk_norm)

    def weights(self) -> Iterator[Weight]:
        width, per_group = self.head_dim, self.num_heads // self.num_groups
        projections = (
            Projection("q_proj", per_group * width),
            Projection("k_proj", width),
            Projection("v_proj", width),
        )
        qkv, rows = "self_attention.linear_qkv", self.num_rows
        yield Weight(f"{qkv}.weight", (rows, self.hidden_size), "rows", projections, self.num_groups)
        if self.qkv_bias:
            yield Weight(f"{qkv}.bias", (rows,), "rows", projections, self.num_groups)
        if self.qk_norm:
            for head in "qk":
                yield Weight(f"self_attention.{head}_layernorm.weight", (width,))
        yield output_projection(self.hidden_size, self.num_heads * width)

    def divided(self) -> dict[str, int]:
        return {"num_query_groups": self.num_groups}

    def settings(self) -> dict[str, Any]:
        return {
            "num_attention_heads": self.num_heads,
            "num_query_groups": self.num_groups,
            "kv_channels": self.head_dim,
            "add_qkv_bias": self.qkv_bias,
            "qk_layernorm": self.qk_norm,
        }

    def use(self, spec: ModuleSpec, groups: RoleGroups, *, exact: bool) -> None:
        from hpcrl.model.blocks.attention_modules import ExactPackedAttention, PackedAttention
        from hpcrl.model.blocks.layers import RMSNorm

        attention = spec.submodules.self_attention.submodules
        core = ExactPackedAttention if exact else PackedAttention
        attention.core_attention = core if self.window is None else partial(core, window=self.window)
        if self.qk_norm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm

    def cached(self, tp_size: int) -> CachedHeads:
        groups, width = self.num_groups // tp_size, self.head_dim
        return CachedHeads(groups, self.num_heads // self.num_groups, width, width, window=self.window)

    def step(self, weight: Callable[[str], Tensor], linear: Linear, eps: float) -> AttentionStep:
        from hpcrl.model.blocks.attention_modules import AttentionStep

        return AttentionStep(self, weight, linear, eps)


def output_projection(hidden_size: int, attended: int) -> Weight:
    """The projection of all heads' outputs, `attended` numbers, to the hidden state."""
    name = "self_attention.linear_proj.weight"
    return Weight(name, (hidden_size, attended), "cols", (Projection("o_proj", hidden_size),))
