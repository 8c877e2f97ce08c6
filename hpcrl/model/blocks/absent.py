"""The missing half of a layer that has attention or an MLP only. No torch before modules are built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, get_args

from hpcrl.model.blocks.block import Block, Feature, Half, Layer, Weight
from hpcrl.model.blocks.micro_batch import Computation, Held, Launches, MicroBatch
from hpcrl.model.blocks.norms import Norms

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from torch import Tensor

    from hpcrl.model.blocks.attention_modules import Linear
    from hpcrl.model.tensor_parallel import TensorParallel
    from hpcrl.runtime.groups import RoleGroups


NORM_AND_SUM = Launches(5, 36, 4, 2)


@dataclass(frozen=True)
class Absent(Block):
    """No attention, or no MLP: the layer's other half follows."""

    half: Half

    title: ClassVar[str] = "half a layer"

    @property
    def supports(self) -> frozenset[Feature]:
        return frozenset(get_args(Feature))

    def weights(self) -> Iterator[Weight]:
        return iter(())

    def use(self, spec: ModuleSpec, groups: RoleGroups, *, exact: bool) -> None:
        from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

        module, total = ("self_attention", "self_attn_bda") if self.half == "attention" else ("mlp", "mlp_bda")
        setattr(spec.submodules, module, IdentityOp)
        setattr(spec.submodules, total, IdentityFuncOp)

    def step(self, weight: Callable[[str], Tensor], linear: Linear, eps: float, tp: TensorParallel) -> None:
        return None

    def held(self, batch: MicroBatch) -> Held:
        return Held(0, 0)

    def computation(self, batch: MicroBatch) -> Computation:
        """Return the norm and the sum of the other half, which blocks of attention count for both."""
        sign = 1 if self.half == "attention" else -1
        return Computation((), reductions=0, launches=((NORM_AND_SUM, sign),))


def half_layer(block: Block, half: Half, norms: Norms) -> Layer:
    """Return a layer that has a block for one of its halves only, with the norms of this half."""
    norms = replace(norms, halves=(half,))
    if half == "attention":
        return Layer(block, Absent(block.hidden_size, "mlp"), norms)
    return Layer(Absent(block.hidden_size, "attention"), block, norms)
