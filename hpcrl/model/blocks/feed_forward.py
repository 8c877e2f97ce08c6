"""Feed-forward networks. No torch; activations are in `layers`."""

from __future__ import annotations

import math
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
    from hpcrl.model.exact import TensorParallel
    from hpcrl.runtime.groups import RoleGroups


# Initial numbers of xIELU: softplus of the first is 0.8, that of the second 0.3.
XIELU = {"alpha_p": math.log(math.expm1(0.8)), "alpha_n": math.log(math.expm1(0.3))}
FEED_FORWARD = Launches(14, 39, 8, 3)
Activation = Literal["silu", "gelu_tanh", "relu2", "xielu", "clamped_swiglu"]


@dataclass(frozen=True)
class FeedForward(Block):
    """down(f(gate x) * up x) (Shazeer 2020, arXiv:2002.05202, section 2), or without a gate down(f(up x)).

    activation: f, see `hpcrl.model.blocks.layers.activate`. xIELU has two numbers in each layer that are trained.
    """

    ffn_hidden_size: int
    activation: Activation = "silu"
    is_gated: bool = True

    title: ClassVar[str] = "feed-forward"
    recomputed: ClassVar[Literal["core_attn", "mlp", "moe", ""]] = "mlp"

    @property
    def supports(self) -> frozenset[Feature]:
        found: tuple[Feature, ...] = ("exact", "adapters", "context_parallel", "planned_cp")
        return frozenset((*found, "transformer_engine", "fp8") if self.is_swiglu else found)

    @property
    def is_swiglu(self) -> bool:
        return self.is_gated and self.activation == "silu"

    @property
    def inner_width(self) -> int:
        return self.ffn_hidden_size

    def weights(self) -> Iterator[Weight]:
        yield from mlp_weights("mlp.", self.hidden_size, self.ffn_hidden_size, self.is_gated)
        for name, initial in XIELU.items() if self.activation == "xielu" else ():
            yield Weight(f"mlp.activation_func.{name}", (1,), initial=initial)

    def divided(self) -> dict[str, int]:
        return {"ffn_hidden_size": self.ffn_hidden_size}

    def settings(self) -> dict[str, Any]:
        found: dict[str, Any] = {"ffn_hidden_size": self.ffn_hidden_size, "gated_linear_unit": self.is_gated}
        # Then the spec's module is used in place of megatron's operations.
        return found if self.is_swiglu else {**found, "use_te_activation_func": True}

    def use(self, spec: ModuleSpec, groups: RoleGroups, *, exact: bool) -> None:
        from hpcrl.model.blocks.layers import use_activation

        use_activation(spec, self.activation, self.is_gated, groups.pgc.tp)

    def step(self, weight: Callable[[str], Tensor], linear: Linear, eps: float, tp: TensorParallel) -> FeedForwardStep:
        from hpcrl.model.blocks.layers import FeedForwardStep, activate

        numbers = tuple(weight(f"mlp.activation_func.{name}") for name in XIELU) if self.activation == "xielu" else ()

        def activated(x: Tensor) -> Tensor:
            return activate(x, self.activation, self.is_gated, *numbers)

        return FeedForwardStep(weight("mlp.linear_fc1.weight"), weight("mlp.linear_fc2.weight"), linear, activated)

    def held(self, batch: MicroBatch) -> Held:
        """Return what is held. With adapters the peak is that of the gathered input and the output of an adapter of
        gate or up before the sum, which is more than SwiGLU holds later."""
        width = self.ffn_hidden_size // batch.layout.tp
        kept_width = activation_width(self.ffn_hidden_size, self.activation, self.is_gated)
        kept = peak = batch.tokens * kept_width // batch.layout.tp * batch.itemsize
        if not self.is_gated:  # its input is not kept
            peak += batch.tokens * width * batch.itemsize
        if batch.lora is not None:
            is_adapted = not {"gate_proj", "up_proj"}.isdisjoint(batch.lora.targets)
            peak += batch.gathered(self.hidden_size) + is_adapted * batch.tokens * width * batch.itemsize
        return Held(kept, peak, backward=down_peak(batch, batch.tokens, self.hidden_size, width))

    def computation(self, batch: MicroBatch) -> Computation:
        activation = 3 * (self.ffn_hidden_size / batch.layout.tp)
        return super().computation(batch)._replace(elementwise=activation, launches=((FEED_FORWARD, 1),))


def activation_width(ffn_hidden_size: int, activation: Activation, is_gated: bool) -> int:
    """Return the numbers of a token that an activation keeps. SwiGLU: gate and up together, the gate's activation, a
    copy of up (megatron adds an offset of 0), and their product; a clamped one the clamped gate, and its sigmoid."""
    with_gate = {"silu": 5, "clamped_swiglu": 7}.get(activation, 4)
    return (with_gate if is_gated else 2) * ffn_hidden_size


def down_peak(batch: MicroBatch, rows: int, hidden_size: int, width: int) -> int:
    """Return the bytes at the end of the backward pass of SwiGLU with a rank's `width` columns: the gradient of the
    product, and the larger of the same again and of the gathered input with the gradient of a weight."""
    product = rows * width * batch.itemsize
    weight = width * hidden_size * batch.itemsize if batch.lora is None else 0
    return product + max(batch.gathered(hidden_size) + weight, product)


def mlp_weights(
    prefix: str, hidden_size: int, ffn_hidden_size: int, is_gated: bool, *, has_bias: bool = False
) -> Iterator[Weight]:
    """The weights of a feed-forward network; with biases it has a gate."""
    if is_gated:
        yield from gated_weights(prefix, hidden_size, ffn_hidden_size, has_bias=has_bias)
    else:
        up = (Projection("up_proj", ffn_hidden_size),)
        yield Weight(f"{prefix}linear_fc1.weight", (ffn_hidden_size, hidden_size), "rows", up)
        yield down_weight(prefix, hidden_size, ffn_hidden_size)


def gated_weights(prefix: str, hidden_size: int, ffn_hidden_size: int, *, has_bias: bool = False) -> Iterator[Weight]:
    """Gate and up in one matrix, and down."""
    both = Projection("gate_proj", ffn_hidden_size), Projection("up_proj", ffn_hidden_size)
    yield Weight(f"{prefix}linear_fc1.weight", (2 * ffn_hidden_size, hidden_size), "gated", both)
    if has_bias:
        yield Weight(f"{prefix}linear_fc1.bias", (2 * ffn_hidden_size,), "gated", both)
    yield down_weight(prefix, hidden_size, ffn_hidden_size)
    if has_bias:
        yield Weight(f"{prefix}linear_fc2.bias", (hidden_size,))


def down_weight(prefix: str, hidden_size: int, ffn_hidden_size: int) -> Weight:
    down = (Projection("down_proj", hidden_size),)
    return Weight(f"{prefix}linear_fc2.weight", (hidden_size, ffn_hidden_size), "cols", down)
