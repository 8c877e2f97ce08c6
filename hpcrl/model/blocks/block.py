"""What a layer is made of: blocks, and the weights of a block. No torch.

A block is a file. Its class says what the block is without torch: its weights and how parallelism splits them, what it
can do, and what its passes hold, compute and send. Its methods that build modules import torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

from hpcrl.model.blocks.micro_batch import Computation, Held, Launches, Matrix, MicroBatch, Products
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from torch import Tensor

    from hpcrl.model.blocks.attention_modules import Linear
    from hpcrl.model.blocks.norms import Norms
    from hpcrl.model.exact import TensorParallel
    from hpcrl.model.shape import Lora
    from hpcrl.runtime.groups import RoleGroups
    from hpcrl.runtime.layout import Layout

Size: TypeAlias = tuple[int, ...]  # of a tensor
Half = Literal["attention", "mlp"]  # of a layer
# How tensor parallelism splits a weight: not, by rows, by columns, or each half of the rows.
Cut = Literal["whole", "rows", "cols", "gated"]
# exact: see hpcrl.model.exact. context_parallel: ranks may divide the tokens of sequences. planned_cp: `hpcrl plan`
# counts its memory then.
Feature = Literal["exact", "adapters", "transformer_engine", "fp8", "context_parallel", "planned_cp"]

NORM_AND_SUM = Launches(5, 36, 4, 2)  # of a layer


class Projection(NamedTuple):
    """A matrix of Hugging Face's, by Llama's name, and its rows in each period of a weight."""

    name: str
    rows: int


class Box(NamedTuple):
    """A rectangle of a global 2-D tensor (a 1-D tensor counts as (n, 1)) and where it starts in the local tensor."""

    global_rows: tuple[int, int]
    global_cols: tuple[int, int]
    local_row: int
    local_col: int

    def within(self, rows: tuple[int, int], cols: tuple[int, int]) -> Box | None:
        """Return the part in these rows and columns of the global tensor; None if there is none."""
        top, bottom = max(self.global_rows[0], rows[0]), min(self.global_rows[1], rows[1])
        left, right = max(self.global_cols[0], cols[0]), min(self.global_cols[1], cols[1])
        if top >= bottom or left >= right:
            return None
        row, col = self.local_row + top - self.global_rows[0], self.local_col + left - self.global_cols[0]
        return Box((top, bottom), (left, right), row, col)


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
    """A whole weight of a layer. `name` is megatron's, without the layer's prefix.

    The weight holds the rows of the matrices `projections`, in this order, `periods` times: those of linear_qkv once
    per query group. A frozen weight has no gradient and no optimizer.
    """

    name: str
    size: Size
    cut: Cut = "whole"
    projections: tuple[Projection, ...] = ()
    periods: int = 1
    is_frozen: bool = False
    initial: float | None = None  # of all elements; None: as `hpcrl.model.build.initial_weight` says

    def local_size(self, ranks: int) -> Size:
        """Return the size of a rank's part if so many ranks split the weight."""
        axis = {"whole": None, "cols": 1}.get(self.cut, 0)
        return tuple(length // ranks if place == axis else length for place, length in enumerate(self.size))

    def boxes(self, rank: int, ranks: int) -> tuple[Box, ...]:
        """Return the rectangles of a rank's part, which tile its local tensor."""
        rows, cols = self.size[0], math.prod(self.size[1:])
        if self.cut == "cols":
            width = cols // ranks
            return (Box((0, rows), (rank * width, (rank + 1) * width), 0, 0),)
        if self.cut == "whole":
            rank, ranks = 0, 1
        count = 2 if self.cut == "gated" else 1
        each = rows // count // ranks
        firsts = [half * (rows // count) + rank * each for half in range(count)]
        return tuple(Box((first, first + each), (0, cols), half * each, 0) for half, first in enumerate(firsts))

    def adapters(self, lora: Lora | None) -> Iterator[Weight]:
        """Yield A (r, in) and B (out, r) of each projection with an adapter, split as the weight is."""
        cuts: tuple[Cut, Cut] = ("cols", "whole") if self.cut == "cols" else ("whole", "rows")
        parent = self.name.removesuffix("weight").rpartition("linear_")[0]
        for projection in self.projections:
            if lora is not None and len(self.size) == 2 and projection.name in lora.targets:
                yield Weight(f"{parent}{projection.name}.lora_A", (lora.rank, self.size[1]), cuts[0])
                yield Weight(f"{parent}{projection.name}.lora_B", (self.periods * projection.rows, lora.rank), cuts[1])


class Part(NamedTuple):
    """A rank's parts of weights with the same size: `copies` of them."""

    size: Size
    copies: int = 1
    is_expert: bool = False
    is_adapter: bool = False

    @property
    def numel(self) -> int:
        return self.copies * math.prod(self.size)


@dataclass(frozen=True)
class Block:
    """A part of a layer. Every weight is within the module `self_attention` or `mlp` of megatron's layer.

    `title` is its name in messages. `recomputed` is its word in `model.recompute.modules`, if it has one.

    The bytes and the seconds of a pass are sums of what blocks return for a `MicroBatch`.
    """

    hidden_size: int

    title: ClassVar[str]
    recomputed: ClassVar[Literal["core_attn", "mlp", "moe", ""]] = ""

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

    @property
    def choices(self) -> int:
        """Experts that a token is sent to, which routing replay records."""
        return 0

    @property
    def inner_width(self) -> int:
        """Numbers of a token between the first and the last product of an MLP."""
        return 0

    def weights(self) -> Iterator[Weight]:
        """Yield all weights but those of experts, in the order of the module."""
        raise NotImplementedError

    def expert_weights(self) -> Iterator[Weight]:
        """Yield the weights of one expert, with names within the expert."""
        return iter(())

    def parts(self, layout: Layout, lora: Lora | None = None) -> tuple[Part, ...]:
        """Return a rank's parts of all weights and their adapters."""
        return _parts(self, layout.tp, layout.ep, layout.etp, lora)

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

    def step(self, weight: Callable[[str], Tensor], linear: Linear, eps: float, tp: TensorParallel) -> Any:
        """Return what the block computes in rollout, from a rank's weights by their names within the layer: an object
        such as `AttentionStep`, or `FeedForwardStep` for a block of the MLP.

        Args:
            eps: eps of the norms.
            tp: the engine's ranks, which sum the parts of the output.
        """
        raise NotImplementedError

    def inputs(self) -> dict[str, int]:
        """Return the bytes of each token that a micro-batch has for the block, by name. Blocks share equal names."""
        return {}

    def held(self, batch: MicroBatch) -> Held:
        """Return the bytes that a rank holds. Raises InputError for a block that does not say it."""
        raise InputError(f"the memory of {self.title} is not known; its block needs a method `held`")

    def kept_by_adapters(self, batch: MicroBatch) -> int:
        """Return the bytes by which adapters change what is kept."""
        return low_rank_bytes(self.weights(), batch, batch.layout.tp, batch.tokens, batch.local)

    def computation(self, batch: MicroBatch) -> Computation:
        """Return the products with all weights but those of experts; blocks add to it."""
        return Computation((Products(batch.tokens, matrices(self.parts(batch.layout))),))


@lru_cache(maxsize=512)
def _parts(block: Block, tp: int, ep: int, etp: int, lora: Lora | None) -> tuple[Part, ...]:
    found, own = list[Part](), block.count_of_experts // ep
    for is_expert, weights, ranks in ((False, block.weights(), tp), (True, block.expert_weights(), etp)):
        for weight in weights:
            copies = own if is_expert else 1
            found.append(Part(weight.local_size(ranks), copies, is_expert))
            found += [Part(each.local_size(ranks), copies, is_expert, True) for each in weight.adapters(lora)]
    return tuple(found)


@lru_cache(maxsize=512)
def matrices(parts: tuple[Part, ...], *, are_experts: bool = False, are_adapters: bool = False) -> tuple[Matrix, ...]:
    """Return the matrices among parts of weights: those of one expert or outside of experts, adapters or others."""
    wanted = (part.size for part in parts if (part.is_expert, part.is_adapter) == (are_experts, are_adapters))
    return tuple(Matrix(size[1], size[0]) for size in wanted if len(size) == 2)


def low_rank_bytes(weights: Iterable[Weight], batch: MicroBatch, ranks: int, tokens: int, local: int) -> int:
    """Return the bytes by which adapters change what is kept for products with these weights, which `ranks` ranks
    split.

    The output of A is kept for B. The input of a matrix without adapters is not kept, because the matrix is frozen.
    There are `tokens` rows where the ranks have all tokens, and `local` rows where each has its own.
    """
    total, lora = 0, batch.lora
    for weight in weights:
        if lora is not None and len(weight.size) == 2 and weight.projections:
            low, rows = (local, tokens) if weight.cut == "cols" else (tokens, local)
            count = sum(projection.name in lora.targets for projection in weight.projections)
            total += count * low * lora.rank if count else -rows * weight.local_size(ranks)[1]
    return total * batch.itemsize


@dataclass(frozen=True)
class Layer:
    """attention: what mixes tokens. mlp: what maps each token. One may be `Absent`."""

    attention: Block
    mlp: Block
    norms: Norms

    @cached_property
    def _hash(self) -> int:
        return hash((self.attention, self.mlp, self.norms))

    def __hash__(self) -> int:
        return self._hash  # models have many layers, which are counted by kind

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

    def parts(self, layout: Layout, lora: Lora | None = None) -> tuple[Part, ...]:
        """Return a rank's parts of all weights and their adapters."""
        attention, mlp = (block.parts(layout, lora) for block in self.blocks)
        return *self._norm_parts, *attention, *mlp

    @cached_property
    def _norm_parts(self) -> tuple[Part, ...]:
        of_blocks = {weight.name for block in self.blocks for weight in block.weights()}
        return tuple(Part(weight.size) for weight in self.weights if weight.name not in of_blocks)

    def kept(self, batch: MicroBatch, recomputed: Collection[str] = ()) -> int:
        """Return the bytes that autograd keeps, if blocks with the words `recomputed` are recomputed."""
        total = self.norms.kept(batch, self.attention.hidden_size)
        for block in self.blocks:
            held = block.held(batch)
            total += held.inputs if block.recomputed in recomputed else held.kept
            total += block.kept_by_adapters(batch)
        return total

    def held_again(self, batch: MicroBatch, recomputed: Collection[str]) -> int:
        """Return the most bytes that the recomputation of a block adds to what is kept."""
        again = (block.held(batch) for block in self.blocks if block.recomputed in recomputed)
        return max((held.kept - held.inputs for held in again), default=0)

    def peak(self, batch: MicroBatch) -> int:
        """Return the most bytes in a forward pass without gradients."""
        attention, mlp = (block.held(batch) for block in self.blocks)
        hidden = batch.hidden(self.attention.hidden_size)
        # The MLP's residual is not the layer's input if there is attention.
        return 3 * hidden + max(attention.peak, ("attention" in self.norms.halves) * hidden + mlp.peak)

    def backward_peak(self, batch: MicroBatch) -> int:
        """Return the bytes besides what is kept in the backward pass of the MLP, at its end, or of attention, when MLP
        and its norms have freed what they kept."""
        hidden, (attention, mlp) = self.attention.hidden_size, (block.held(batch) for block in self.blocks)
        freed = mlp.kept + self.norms.kept(batch, hidden, ("mlp",))
        return 2 * batch.hidden(hidden) + max(mlp.backward, attention.backward - freed)


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


def blocks_of(layers: Iterable[Layer]) -> Counter[Block]:
    """Return the different blocks of layers, and how many layers have each."""
    return Counter(block for layer in layers for block in layer.blocks)


def unsupported(layers: Sequence[Layer], feature: Feature) -> str | None:
    """Return the first block that does not support a feature, such as "latent attention (layer 0)"; None if all do."""
    for number, layer in enumerate(layers):
        for part in (*layer.blocks, layer.norms):
            if feature not in part.supports:
                return f"{part.title} (layer {number})"
    return None
