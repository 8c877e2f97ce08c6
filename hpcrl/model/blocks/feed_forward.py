"""The SwiGLU feed-forward network. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hpcrl.model.blocks.block import Block, Feature, Projection, Weight
from hpcrl.model.blocks.micro_batch import Computation, Held, Launches, MicroBatch

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from torch import Tensor

    from hpcrl.model.blocks.attention_modules import Linear
    from hpcrl.model.blocks.layers import FeedForwardStep
    from hpcrl.runtime.groups import RoleGroups


FEED_FORWARD = Launches(14, 39, 8, 3)


@dataclass(frozen=True)
class FeedForward(Block):
    """down(silu(gate x) * up x) (Shazeer 2020, arXiv:2002.05202, section 2)."""

    ffn_hidden_size: int

    title: ClassVar[str] = "feed-forward"
    recomputed: ClassVar[Literal["core_attn", "mlp", "moe", ""]] = "mlp"

    @property
    def supports(self) -> frozenset[Feature]:
        return frozenset(("exact", "adapters", "transformer_engine", "fp8", "context_parallel", "planned_cp"))

    @property
    def inner_width(self) -> int:
        return self.ffn_hidden_size

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

    def held(self, batch: MicroBatch) -> Held:
        """Return what is held. With adapters the peak is that of the gathered input and the output of an adapter of
        gate or up before the sum, which is more than SwiGLU holds later."""
        width = self.ffn_hidden_size // batch.layout.tp
        kept = peak = batch.tokens * swiglu_width(self.ffn_hidden_size) // batch.layout.tp * batch.itemsize
        if batch.lora is not None:
            is_adapted = not {"gate_proj", "up_proj"}.isdisjoint(batch.lora.targets)
            peak += batch.gathered(self.hidden_size) + is_adapted * batch.tokens * width * batch.itemsize
        return Held(kept, peak, backward=down_peak(batch, batch.tokens, self.hidden_size, width))

    def computation(self, batch: MicroBatch) -> Computation:
        activation = 3 * (self.ffn_hidden_size / batch.layout.tp)
        return super().computation(batch)._replace(elementwise=activation, launches=((FEED_FORWARD, 1),))


def swiglu_width(ffn_hidden_size: int) -> int:
    """Return the numbers of a token that SwiGLU keeps: gate and up together, the gate's activation, a copy of up
    (megatron adds an offset of 0), and their product."""
    return 5 * ffn_hidden_size


def down_peak(batch: MicroBatch, rows: int, hidden_size: int, width: int) -> int:
    """Return the bytes at the end of the backward pass of SwiGLU with a rank's `width` columns: the gradient of the
    product, and the larger of the same again and of the gathered input with the gradient of a weight."""
    product = rows * width * batch.itemsize
    weight = width * hidden_size * batch.itemsize if batch.lora is None else 0
    return product + max(batch.gathered(hidden_size) + weight, product)


def gated_weights(prefix: str, hidden_size: int, ffn_hidden_size: int) -> Iterator[Weight]:
    """Gate and up in one matrix, and down."""
    both = Projection("gate_proj", ffn_hidden_size), Projection("up_proj", ffn_hidden_size)
    yield Weight(f"{prefix}linear_fc1.weight", (2 * ffn_hidden_size, hidden_size), "gated", both)
    down = (Projection("down_proj", hidden_size),)
    yield Weight(f"{prefix}linear_fc2.weight", (hidden_size, ffn_hidden_size), "cols", down)
