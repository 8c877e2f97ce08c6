"""The norms of a layer, and where they stand. No torch before modules are built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcrl.model.blocks.block import Feature, Weight

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from torch import Tensor

    from hpcrl.model.blocks.micro_batch import MicroBatch


@dataclass(frozen=True)
class Norms:
    """RMSNorm of the inputs of attention and MLP, of their outputs before they are added to the residual, or both."""

    before: bool = True
    after: bool = False

    title = "norms"

    @property
    def supports(self) -> frozenset[Feature]:
        found: tuple[Feature, ...] = ("exact", "adapters", "fp8", "planned_cp")
        return frozenset(found if self.after else (*found, "transformer_engine", "tensorrt_llm"))

    def around(self, hidden_size: int, block: str, weights: Iterator[Weight]) -> Iterator[Weight]:
        """Yield the weights of a block, "attention" or "mlp", between those of its norms."""
        if self.before:
            name = "input_layernorm" if block == "attention" else "pre_mlp_layernorm"
            yield Weight(f"{name}.weight", (hidden_size,))
        yield from weights
        if self.after:
            yield Weight(f"post_{block}_layernorm.weight", (hidden_size,))

    def kept(self, batch: MicroBatch, hidden_size: int) -> int:
        """Return the bytes that autograd keeps."""
        return 2 * (self.before + self.after) * batch.norm(batch.local, hidden_size)

    def use(self, spec: ModuleSpec, *, uses_te: bool) -> None:
        """Set the norms in a layer of megatron's local spec, whose other modules are set."""
        from megatron.core.transformer.identity_op import IdentityOp

        from hpcrl.model.blocks.layers import RMSNorm, with_output_norms

        if not uses_te:
            norm = RMSNorm if self.before else IdentityOp
            spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
        if self.after:
            spec.module = with_output_norms(spec.module)

    def step(self, weight: Callable[[str], Tensor]) -> dict[str, Any]:
        """Return the weights of the norms in rollout, by place; those that the layer does not have are None."""
        return {
            "before_mlp": weight("pre_mlp_layernorm.weight") if self.before else None,
            "after_attention": weight("post_attention_layernorm.weight") if self.after else None,
            "after_mlp": weight("post_mlp_layernorm.weight") if self.after else None,
        }
