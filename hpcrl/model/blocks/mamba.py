"""Mamba-2. No torch; modules are in `mamba_modules`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hpcrl.kernels import CHUNK, chunk_width
from hpcrl.model.blocks.block import Block, CachedState, Feature, Projection, Weight
from hpcrl.model.blocks.micro_batch import FP32, Computation, Held, Launches, Matrix, MicroBatch, Products

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from torch import Tensor

    from hpcrl.model.blocks.attention_modules import Linear
    from hpcrl.model.blocks.recurrent_modules import RecurrentStep
    from hpcrl.model.exact import TensorParallel
    from hpcrl.runtime.groups import RoleGroups


MAMBA = Launches(180, 730, 98, 40)  # with the norms and sums of the layer
CHUNK_STEP = Launches(6, 18, 0, 0)  # from one chunk of all sequences to the next
DT = 0.01  # initial


@dataclass(frozen=True)
class Mamba(Block):
    """Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): x, B and C after a short convolution, the recurrence, a gate, a norm
    of each group of heads.

    Heads of a group have the same B and C, of `state_dim` numbers. Tensor parallelism divides the groups, so weights
    have the rows of one group after the other. Steps dt of time are at least `least_dt`.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_width: int = 4
    has_conv_bias: bool = True
    least_dt: float = 0.0

    title: ClassVar[str] = "Mamba-2"

    @property
    def supports(self) -> frozenset[Feature]:
        """The features that it works with; with adapters it is frozen, because no projection has a name of Llama's."""
        return frozenset(("adapters",))

    @property
    def inner_dim(self) -> int:
        """Numbers of a token in all heads."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Numbers of a token in all x, B and C."""
        return self.inner_dim + 2 * self.num_groups * self.state_dim

    @property
    def rows_of_group(self) -> dict[str, int]:
        """Rows of `in_proj` in a group of heads, in their order."""
        heads = self.num_heads // self.num_groups
        inner = heads * self.head_dim
        return {"z": inner, "x": inner, "B": self.state_dim, "C": self.state_dim, "dt": heads}

    def weights(self) -> Iterator[Weight]:
        prefix, hidden, groups, rows = "self_attention.", self.hidden_size, self.num_groups, self.rows_of_group
        parts = tuple(Projection(f"in_proj_{name}", count) for name, count in rows.items())
        yield Weight(f"{prefix}in_proj.weight", (groups * sum(rows.values()), hidden), "rows", parts, groups)
        mixed = tuple(Projection(f"conv1d_{name}", rows[name]) for name in "xBC")
        yield Weight(f"{prefix}conv1d.weight", (self.channels, 1, self.conv_width), "rows", mixed, groups)
        if self.has_conv_bias:
            yield Weight(f"{prefix}conv1d.bias", (self.channels,), "rows", mixed, groups)
        yield Weight(f"{prefix}A_log", (self.num_heads,), "rows", initial=0.0)
        yield Weight(f"{prefix}D", (self.num_heads,), "rows", initial=1.0)
        yield Weight(f"{prefix}dt_bias", (self.num_heads,), "rows", initial=math.log(math.expm1(DT)))
        yield Weight(f"{prefix}norm.weight", (self.inner_dim,), "rows", initial=1.0)
        yield Weight(f"{prefix}out_proj.weight", (hidden, self.inner_dim), "cols")

    def divided(self) -> dict[str, int]:
        return {"n_groups": self.num_groups}

    def cached(self, tp_size: int) -> CachedState:
        """The last inputs of the convolution, and a matrix of each head."""
        window = self.conv_width - 1, self.channels // tp_size
        return CachedState((window, (self.num_heads // tp_size, self.head_dim, self.state_dim)))

    def held(self, batch: MicroBatch) -> Held:
        """Return what is held.

        Kept are inputs and outputs of the convolution, x apart, what dt is computed from, the gate, inputs and output
        of the norm. The recurrence and the norm keep their inputs only, and are computed again.
        """
        tp, itemsize = batch.layout.tp, batch.itemsize
        channels, inner, heads, groups = (
            size // tp for size in (self.channels, self.inner_dim, self.num_heads, self.num_groups)
        )
        apart = inner if groups > 1 else 0
        saved = batch.tokens * ((2 * channels + apart + 3 * inner) * itemsize + 3 * heads * FP32)
        # The recurrence in torch: products of the tokens of a chunk for each head, vectors, and states between chunks;
        # in 16 bits copies of x, B and C.
        chunk, keys = chunk_width(batch.longest or CHUNK, CHUNK), groups * self.state_dim
        fixed = 2 * heads * chunk + 2 * inner * self.state_dim // chunk
        inside, again = fixed + 6 * inner + 2 * keys + 4 * heads, fixed + 7 * inner + 4 * keys
        if itemsize < FP32:
            inside, again = inside + inner, again + 2 * inner + 2 * keys
        outside = (2 * channels + inner + heads + apart) * itemsize
        peak = batch.tokens * (inside * FP32 + outside)
        again *= batch.tokens * FP32
        return Held(saved, peak, backward=again)

    def computation(self, batch: MicroBatch) -> Computation:
        """Return the computation. Products of the recurrence are those with the state, and with the tokens of a
        chunk."""
        tp, found = batch.layout.tp, super().computation(batch)
        of_head = (Matrix(self.head_dim, self.state_dim),) * 2 + (Matrix(CHUNK, self.head_dim),)
        heads = Products(batch.tokens * self.num_heads / tp, of_head)
        groups = Products(batch.tokens * self.num_groups / tp, (Matrix(self.state_dim, CHUNK),))
        return found._replace(
            products=(*found.products, heads, groups),
            elementwise=(8 * self.channels + 8 * self.inner_dim) / tp,
            launches=((MAMBA, 1), (CHUNK_STEP, -(-batch.longest // CHUNK))),
        )

    def use(self, spec: ModuleSpec, groups: RoleGroups, *, exact: bool) -> None:
        from megatron.core.transformer.spec_utils import ModuleSpec

        from hpcrl.model.blocks.mamba_modules import MambaMixer

        spec.submodules.self_attention = ModuleSpec(module=MambaMixer, params={"block": self})

    def step(self, weight: Callable[[str], Tensor], linear: Linear, eps: float, tp: TensorParallel) -> RecurrentStep:
        from hpcrl.model.blocks.mamba_modules import rollout_step

        return rollout_step(self, weight, linear, eps)
