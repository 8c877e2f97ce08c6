"""The norms of a layer, and where they stand. No torch before modules are built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcrl.model.blocks.block import Feature, Half, Weight

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from torch import Tensor

    from hpcrl.model.blocks.layers import NormStep, RMSNorm
    from hpcrl.model.blocks.micro_batch import MicroBatch


def norm_weight(name: str, width: int, zero_centered: bool) -> Weight:
    """Return the weight of a norm of `width` numbers."""
    return Weight(f"{name}.weight", (width,), initial=0.0 if zero_centered else 1.0)


def norm_module(zero_centered: bool) -> type[RMSNorm]:
    """Return the class of a norm's module."""
    from hpcrl.model.blocks.layers import RMSNorm, ZeroCenteredRMSNorm

    return ZeroCenteredRMSNorm if zero_centered else RMSNorm


@dataclass(frozen=True)
class Norms:
    """RMSNorm of the inputs of attention and MLP, of their outputs before they are added to the residual, or both.

    zero_centered: the factors are 1 + w for stored weights w, as in Gemma and Qwen3-Next. halves: the halves that the
    layer has.
    """

    before: bool = True
    after: bool = False
    zero_centered: bool = False
    halves: tuple[Half, ...] = ("attention", "mlp")

    title = "norms"

    @property
    def supports(self) -> frozenset[Feature]:
        found: tuple[Feature, ...] = ("exact", "adapters", "fp8", "context_parallel", "planned_cp")
        is_plain = not (self.after or self.zero_centered)
        return frozenset((*found, "transformer_engine") if is_plain else found)

    def around(self, hidden_size: int, half: Half, weights: Iterator[Weight]) -> Iterator[Weight]:
        """Yield the weights of a block between those of its norms."""
        if self.before and half in self.halves:
            name = "input_layernorm" if half == "attention" else "pre_mlp_layernorm"
            yield norm_weight(name, hidden_size, self.zero_centered)
        yield from weights
        if self.after and half in self.halves:
            yield norm_weight(f"post_{half}_layernorm", hidden_size, self.zero_centered)

    def kept(self, batch: MicroBatch, hidden_size: int, of: Sequence[Half] = ("attention", "mlp")) -> int:
        """Return the bytes that autograd keeps, of norms of these halves."""
        return len({*of} & {*self.halves}) * (self.before + self.after) * batch.norm(batch.local, hidden_size)

    def use(self, spec: ModuleSpec, *, uses_te: bool) -> None:
        """Set the norms in a layer of megatron's local spec, whose other modules are set."""
        from megatron.core.transformer.identity_op import IdentityOp

        from hpcrl.model.blocks.layers import with_output_norms

        norm = norm_module(self.zero_centered)
        for half, name in (("attention", "input_layernorm"), ("mlp", "pre_mlp_layernorm")):
            if half not in self.halves or not self.before:
                setattr(spec.submodules, name, IdentityOp)
            elif not uses_te:
                setattr(spec.submodules, name, norm)
        if self.after:
            spec.module = with_output_norms(spec.module, norm, self.halves)

    def step(self, weight: Callable[[str], Tensor], eps: float) -> dict[str, NormStep | None]:
        """Return the norms in rollout, by place; those that the layer does not have are None."""
        from hpcrl.model.blocks.layers import NormStep

        places = {
            "before_attention": ("input_layernorm", self.before and "attention" in self.halves),
            "before_mlp": ("pre_mlp_layernorm", self.before and "mlp" in self.halves),
            "after_attention": ("post_attention_layernorm", self.after and "attention" in self.halves),
            "after_mlp": ("post_mlp_layernorm", self.after and "mlp" in self.halves),
        }
        return {
            place: NormStep(weight(f"{name}.weight"), eps, self.zero_centered) if has_norm else None
            for place, (name, has_norm) in places.items()
        }
