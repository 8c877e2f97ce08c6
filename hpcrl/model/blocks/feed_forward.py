"""The SwiGLU feed-forward network. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hpcrl.model.blocks.block import Block, Feature, Projection, Weight

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from torch import Tensor

    from hpcrl.model.blocks.attention_modules import Linear
    from hpcrl.model.blocks.layers import FeedForwardStep
    from hpcrl.runtime.groups import RoleGroups


@dataclass(frozen=True)
class FeedForward(Block):
    """down(silu(gate x) * up x) (Shazeer 2020, arXiv:2002.05202, section 2)."""

    ffn_hidden_size: int

    title: ClassVar[str] = "feed-forward"

    @property
    def supports(self) -> frozenset[Feature]:
        return frozenset(("exact", "adapters", "transformer_engine", "fp8", "planned_cp", "tensorrt_llm"))

    def weights(self) -> Iterator[Weight]:
        return gated_weights("mlp.", self.hidden_size, self.ffn_hidden_size)

    def divided(self) -> dict[str, int]:
        return {"ffn_hidden_size": self.ffn_hidden_size}

    def settings(self) -> dict[str, Any]:
        return {"ffn_hidden_size": self.ffn_hidden_size}

    def use(self, spec: ModuleSpec, groups: RoleGroups, *, exact: bool) -> None:
        from hpcrl.model.blocks.layers import use_swiglu

        use_swiglu(spec)

    def step(self, weight: Callable[[str], Tensor], linear: Linear, eps: float) -> FeedForwardStep:
        from hpcrl.model.blocks.layers import FeedForwardStep

        return FeedForwardStep(weight("mlp.linear_fc1.weight"), weight("mlp.linear_fc2.weight"), linear)


def gated_weights(prefix: str, hidden_size: int, ffn_hidden_size: int) -> Iterator[Weight]:
    """Gate and up in one matrix, and down."""
    both = Projection("gate_proj", ffn_hidden_size), Projection("up_proj", ffn_hidden_size)
    yield Weight(f"{prefix}linear_fc1.weight", (2 * ffn_hidden_size, hidden_size), "gated", both)
    down = (Projection("down_proj", hidden_size),)
    yield Weight(f"{prefix}linear_fc2.weight", (hidden_size, ffn_hidden_size), "cols", down)
