"""What a layer is made of: blocks, and the weights of a block. No torch.

A block is a file. Its class says what the block is without torch: its weights and how parallelism splits them, and what
it can do. Its methods that build modules import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from torch import Tensor

    from hpcrl.model.blocks.attention_modules import Linear
    from hpcrl.model.blocks.norms import Norms
    from hpcrl.runtime.groups import RoleGroups

Size: TypeAlias = tuple[int, ...]  # of a tensor
# How tensor parallelism splits a weight: not, by rows, by columns, or each half of the rows.
Cut = Literal["whole", "rows", "cols", "gated"]
# exact: see hpcrl.model.exact. planned_cp: `hpcrl plan` counts its memory under context parallelism.
Feature = Literal["exact", "adapters", "transformer_engine", "fp8", "planned_cp", "tensorrt_llm"]


class Projection(NamedTuple):
    """A matrix of Hugging Face's, by Llama's name, and its rows in each period of a weight."""

    name: str
    rows: int


class CachedHeads(NamedTuple):
    """What a rank caches of each token: keys and values of `groups` heads, each with `queries` query heads, and their
    widths. With value_in_key the first `value_dim` elements of a key are also its value. window: the last tokens that
    attention sees; None: all."""

    groups: int
    queries: int
    key_dim: int
    value_dim: int
    value_in_key: bool = False
    window: int | None = None

    @property
    def width(self) -> int:
        """Numbers of a token."""
        return self.groups * (self.key_dim if self.value_in_key else self.key_dim + self.value_dim)


class CachedState(NamedTuple):
    """Tensors of these sizes for each sequence, whatever its length; fp32."""

    sizes: tuple[Size, ...]

    @property
    def numel(self) -> int:
        return sum(math.prod(size) for size in self.sizes)


@dataclass(frozen=True)
class Weight:
    """A whole weight of a layer. name: megatron's, without the layer's prefix.

    projections: the matrices whose rows it holds, in this order, `periods` times: those of linear_qkv once per query
    group. frozen: has no gradient and no optimizer.
    """

    name: str
    size: Size
    cut: Cut = "whole"
    projections: tuple[Projection, ...] = ()
    periods: int = 1
    is_frozen: bool = False


@dataclass(frozen=True)
class Block:
    """A part of a layer. Every weight is within the module `self_attention` or `mlp` of megatron's layer.

    title: in messages.
    """

    hidden_size: int

    title: ClassVar[str]

    @property
    def supports(self) -> frozenset[Feature]:
        """The features that it works with; what is not listed is an error."""
        return frozenset()

    @property
    def sees(self) -> int | None:
        """Tokens that a token attends to, its own included; None: all before it."""
        return None

    @property
    def count_of_experts(self) -> int:
        return 0

    def weights(self) -> Iterator[Weight]:
        """All weights but those of experts, in the order of the module."""
        raise NotImplementedError

    def expert_weights(self) -> Iterator[Weight]:
        """The weights of one expert; names are those within the expert."""
        return iter(())

    def divided(self) -> dict[str, int]:
        """Sizes that tensor parallelism has to divide, by their names in messages."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Fields of megatron's TransformerConfig."""
        return {}

    def use(self, spec: ModuleSpec, groups: RoleGroups, *, exact: bool) -> None:
        """Set the block's modules in a layer of megatron's local spec."""
        raise NotImplementedError

    def cached(self, tp_size: int) -> CachedHeads | CachedState | None:
        """Return what a rank caches in rollout; None: nothing."""
        return None

    def step(self, weight: Callable[[str], Tensor], linear: Linear, eps: float) -> Any:
        """Return what the block computes in rollout, from a rank's weights by their names within the layer: an object
        such as `AttentionStep`, or `FeedForwardStep` for a block of the MLP. eps: of norms."""
        raise NotImplementedError


@dataclass(frozen=True)
class Layer:
    """attention: what mixes tokens. mlp: what maps each token."""

    attention: Block
    mlp: Block
    norms: Norms

    @property
    def num_experts(self) -> int:
        return self.mlp.count_of_experts

    @property
    def blocks(self) -> tuple[Block, Block]:
        return self.attention, self.mlp

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """All weights but those of experts."""
        hidden = self.attention.hidden_size
        attention = self.norms.around(hidden, "attention", self.attention.weights())
        return (*attention, *self.norms.around(hidden, "mlp", self.mlp.weights()))

    @cached_property
    def expert_weights(self) -> tuple[Weight, ...]:
        """The weights of one expert."""
        return tuple(self.mlp.expert_weights())


def unsupported(layers: Sequence[Layer], feature: Feature) -> str | None:
    """Return the first block that does not support a feature, such as "latent attention (layer 0)"; None if all do."""
    for number, layer in enumerate(layers):
        for part in (*layer.blocks, layer.norms):
            if feature not in part.supports:
                return f"{part.title} (layer {number})"
    return None
