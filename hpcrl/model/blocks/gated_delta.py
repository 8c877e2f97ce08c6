"""The gated delta net. No torch; modules are in `gated_delta_modules`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hpcrl.kernels import DELTA_CHUNK, chunk_width
from hpcrl.model.blocks.block import Block, CachedState, Feature, Projection, Weight
from hpcrl.model.blocks.micro_batch import FP32, Collective, Computation, Held, Launches, Matrix, MicroBatch, Products

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from torch import Tensor

    from hpcrl.model.blocks.attention_modules import Linear
    from hpcrl.model.blocks.recurrent_modules import RecurrentStep
    from hpcrl.model.exact import TensorParallel
    from hpcrl.runtime.groups import RoleGroups


GATED_DELTA = Launches(210, 793, 121, 40)  # with the norms and sums of the layer
CHUNK_STEP = Launches(8, 24, 0, 0)  # from one chunk of all sequences to the next


@dataclass(frozen=True)
class GatedDelta(Block):
    """A gated delta net (Yang et al. 2024, arXiv:2412.06464), as Qwen3-Next has it: queries, keys and values after a
    short convolution, the gated delta rule, a gated norm of each head.

    Each key head has num_v_heads / num_k_heads value heads. Tensor parallelism divides the key heads, so weights have
    the rows of one key head after the other.
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_width: int = 4

    title: ClassVar[str] = "a gated delta net"

    @property
    def supports(self) -> frozenset[Feature]:
        """The features that it works with; with adapters it is frozen, because no projection has a name of Llama's."""
        return frozenset(("adapters",))

    @property
    def values_per_key(self) -> int:
        """Value heads of a key head."""
        return self.num_v_heads // self.num_k_heads

    @property
    def value_dim(self) -> int:
        """Numbers of a token in all value heads."""
        return self.num_v_heads * self.head_v_dim

    @property
    def channels(self) -> int:
        """Numbers of a token in all queries, keys and values."""
        return 2 * self.num_k_heads * self.head_k_dim + self.value_dim

    def weights(self) -> Iterator[Weight]:
        prefix, hidden, heads, each = "self_attention.", self.hidden_size, self.num_k_heads, self.values_per_key
        rows = {"q": self.head_k_dim, "k": self.head_k_dim, "v": each * self.head_v_dim, "z": each * self.head_v_dim}
        parts = tuple(Projection(f"in_proj_{name}", count) for name, count in rows.items())
        yield Weight(f"{prefix}in_proj.weight", (self.channels + self.value_dim, hidden), "rows", parts, heads)
        gates = Projection("in_proj_b", each), Projection("in_proj_a", each)
        yield Weight(f"{prefix}in_proj_ba.weight", (2 * self.num_v_heads, hidden), "rows", gates, heads)
        mixed = tuple(Projection(f"conv1d_{name}", rows[name]) for name in "qkv")
        yield Weight(f"{prefix}conv1d.weight", (self.channels, 1, self.conv_width), "rows", mixed, heads)
        yield Weight(f"{prefix}A_log", (self.num_v_heads,), "rows", initial=0.0)
        yield Weight(f"{prefix}dt_bias", (self.num_v_heads,), "rows", initial=1.0)
        yield Weight(f"{prefix}norm.weight", (self.head_v_dim,))
        yield Weight(f"{prefix}out_proj.weight", (hidden, self.value_dim), "cols")

    def divided(self) -> dict[str, int]:
        return {"linear_num_key_heads": self.num_k_heads}

    def cached(self, tp_size: int) -> CachedState:
        """The last inputs of the convolution, and a matrix of each value head."""
        window = self.conv_width - 1, self.channels // tp_size
        return CachedState((window, (self.num_v_heads // tp_size, self.head_k_dim, self.head_v_dim)))

    def held(self, batch: MicroBatch) -> Held:
        """Return what is held.

        Kept are inputs and outputs of the convolution, values apart, what decay and beta are computed from, and of the
        gated norm inputs, factors and output. The rule itself keeps its inputs only, and is computed again.
        """
        tp, itemsize = batch.layout.tp, batch.itemsize
        channels, values, heads = self.channels // tp, self.value_dim // tp, self.num_v_heads // tp
        norm = batch.norm(heads, self.head_v_dim)
        gate = values * (2 * FP32 + itemsize)  # its input, activation and product
        apart = values * itemsize if self.values_per_key > 1 else 0
        saved = batch.tokens * (2 * channels * itemsize + apart + 4 * heads * FP32 + norm + gate)
        # The rule in torch, for each value head: products of the tokens of a chunk, vectors, and states between chunks.
        key, value, chunk = self.head_k_dim, self.head_v_dim, chunk_width(batch.longest or DELTA_CHUNK, DELTA_CHUNK)
        inside = 3 * chunk + 3 * key + 6 * value + key * value // chunk
        again = 7 * (chunk + key + value) + 2 * key * value // chunk
        outside = (2 * channels + values) * itemsize + apart
        peak = batch.tokens * (heads * inside * FP32 + outside)
        return Held(saved, peak, backward=batch.tokens * heads * again * FP32)

    def computation(self, batch: MicroBatch) -> Computation:
        """Return the computation. Products of the rule are those with the state, with the tokens of a chunk, and with
        the inverse of a chunk."""
        tp, linear = batch.layout.tp, super().computation(batch)
        key, value = self.head_k_dim, self.head_v_dim
        of_head = (Matrix(key, value),) * 3 + (Matrix(key, DELTA_CHUNK), Matrix(DELTA_CHUNK, value)) * 2
        rule = Products(batch.tokens * self.num_v_heads / tp, of_head)
        steps = -(-batch.longest // DELTA_CHUNK)
        # Its input is gathered, and the gradient of it scattered, once for each of the two products.
        gathered = Collective("all_gather", batch.gathered(self.hidden_size), ("tp",), times=3)
        return linear._replace(
            products=(*linear.products, rule),
            elementwise=(8 * self.channels + 6 * self.value_dim) / tp,
            exchanges=(gathered,) if batch.shares_tokens else (),
            launches=((GATED_DELTA, 1), (CHUNK_STEP, steps)),
        )

    def use(self, spec: ModuleSpec, groups: RoleGroups, *, exact: bool) -> None:
        from megatron.core.transformer.spec_utils import ModuleSpec

        from hpcrl.model.blocks.gated_delta_modules import GatedDeltaNet

        spec.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, params={"block": self})

    def step(self, weight: Callable[[str], Tensor], linear: Linear, eps: float, tp: TensorParallel) -> RecurrentStep:
        from hpcrl.model.blocks.gated_delta_modules import rollout_step

        return rollout_step(self, weight, linear, eps)
