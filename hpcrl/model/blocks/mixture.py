"""A mixture of experts. No torch; modules are in `router` and `mixture_modules`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from hpcrl.model.blocks.block import Block, Feature, Weight, matrices
from hpcrl.model.blocks.feed_forward import Activation, activation_width, mlp_weights
from hpcrl.model.blocks.micro_batch import FP32, INT64, Collective, Computation, Held, Launches, MicroBatch, Products
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from torch import Tensor

    from hpcrl.model.blocks.attention_modules import Linear
    from hpcrl.model.blocks.mixture_modules import MixtureStep
    from hpcrl.model.exact import TensorParallel
    from hpcrl.runtime.groups import RoleGroups


MIXTURE = Launches(32, 77, 31, 20)
EXPERT = Launches(9, 51, 9, 0)  # on a CPU, with those of the optimizer


class RoutedExperts(NamedTuple):
    """layers: the numbers of those with experts, of which each has `num_experts` and sends a token to `topk`."""

    layers: tuple[int, ...]
    num_experts: int
    topk: int

    @property
    def width(self) -> int:
        """Numbers that record a token's experts, in all layers."""
        return len(self.layers) * self.topk


@dataclass(frozen=True)
class MixtureOfExperts(Block):
    """A router sends each token to `topk` of `num_experts` feed-forward networks of width `ffn_hidden_size`.

    norm_topk_prob: their weights sum to 1, before `routed_scale`, a factor of all. shared_ffn_hidden_size: total width
    of the experts that all tokens go to; 0: none. has_shared_gate: a vector computes a number from each token, and its
    sigmoid multiplies their output. has_score_bias: the choice, not the weights, uses a bias per expert.
    Experts are in `num_groups` groups; a token chooses `topk_groups`, then experts inside them. A group's score is the
    sum of its `group_best` best scores. has_bias: router and experts have biases; those of the router's logits count in
    the weights too. swiglu_alpha, swiglu_limit: of experts with `clamped_swiglu`, see
    `hpcrl.model.blocks.layers.activate`. Without is_gated the activation of all experts is relu2.
    """

    num_experts: int
    ffn_hidden_size: int
    topk: int
    norm_topk_prob: bool = True
    shared_ffn_hidden_size: int = 0
    has_shared_gate: bool = False
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    has_score_bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    group_best: int = 1
    routed_scale: float = 1.0
    has_bias: bool = False
    swiglu_alpha: float | None = None
    swiglu_limit: float | None = None
    is_gated: bool = True

    title: ClassVar[str] = "a mixture of experts"
    recomputed: ClassVar[Literal["core_attn", "mlp", "moe", ""]] = "moe"

    @property
    def supports(self) -> frozenset[Feature]:
        found: set[Feature] = {"adapters", "context_parallel", "planned_cp"}
        if self.is_gated and not self.has_bias:
            found.add("transformer_engine")
        if not self.has_bias and not self.has_shared_gate:
            found.add("exact")
        return frozenset(found)

    @property
    def activation(self) -> tuple[Activation, tuple[float, ...]]:
        """The activation of experts, and its constants."""
        if not self.is_gated:
            return "relu2", ()
        if self.swiglu_alpha is None or self.swiglu_limit is None:
            return "silu", ()
        return "clamped_swiglu", (self.swiglu_alpha, self.swiglu_limit)

    @property
    def is_plain(self) -> bool:
        """Whether the weights are the softmax of the chosen logits, and the choice is by logits."""
        is_softmax = self.score_function == "softmax" and self.norm_topk_prob
        return is_softmax and not self.has_score_bias and self.num_groups == 1

    @property
    def count_of_experts(self) -> int:
        return self.num_experts

    @property
    def choices(self) -> int:
        return self.topk

    @property
    def inner_width(self) -> int:
        return self.topk * self.ffn_hidden_size

    def weights(self) -> Iterator[Weight]:
        yield Weight("mlp.router.weight", (self.num_experts, self.hidden_size))
        if self.has_bias:
            yield Weight("mlp.router.bias", (self.num_experts,))
        if self.has_score_bias:
            yield Weight("mlp.router.expert_bias", (self.num_experts,), is_frozen=True)
        if self.shared_ffn_hidden_size:
            prefix, width = "mlp.shared_experts.", self.shared_ffn_hidden_size
            yield from mlp_weights(prefix, self.hidden_size, width, self.is_gated)
        if self.has_shared_gate:
            yield Weight("mlp.shared_experts.gate_weight", (1, self.hidden_size))

    def expert_weights(self) -> Iterator[Weight]:
        return mlp_weights("", self.hidden_size, self.ffn_hidden_size, self.is_gated, has_bias=self.has_bias)

    def divided(self) -> dict[str, int]:
        shared = self.shared_ffn_hidden_size
        return {"moe_shared_ffn_hidden_size": shared} if shared else {}

    def settings(self) -> dict[str, Any]:
        """No token is dropped, and `Router` has the losses."""
        if self.topk == 1 and self.norm_topk_prob:
            raise InputError(
                "moe_topk=1 with norm_topk_prob=true is not supported: the expert's weight would always be 1"
            )
        return {
            # Then the spec's module is used in place of megatron's operations.
            **({} if self.activation[0] == "silu" else {"use_te_activation_func": True}),
            "gated_linear_unit": self.is_gated,
            "num_moe_experts": self.num_experts,
            "moe_ffn_hidden_size": self.ffn_hidden_size,
            "moe_router_topk": self.topk,
            "moe_router_pre_softmax": not self.norm_topk_prob,
            "moe_router_score_function": self.score_function,
            "moe_router_topk_scaling_factor": self.routed_scale,
            "moe_shared_expert_intermediate_size": self.shared_ffn_hidden_size or None,
            "moe_shared_expert_gate": self.has_shared_gate,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
        }

    def use(self, spec: ModuleSpec, groups: RoleGroups, *, exact: bool) -> None:
        from hpcrl.model.blocks.layers import use_activation
        from hpcrl.model.blocks.mixture_modules import use_mixture_of_experts

        use_mixture_of_experts(spec, self, groups, exact=exact)
        name, constants = self.activation
        use_activation(spec, name, self.is_gated, groups.pgc.tp, constants)

    def step(self, weight: Callable[[str], Tensor], linear: Linear, eps: float, tp: TensorParallel) -> MixtureStep:
        from hpcrl.model.blocks.mixture_modules import MixtureStep

        return MixtureStep(self, weight, linear, tp)

    def inputs(self) -> dict[str, int]:
        return {"sequence of a token": INT64}

    def _copies(self, batch: MicroBatch) -> int:
        """Return the rows of all experts of a rank, equally many on each."""
        return batch.local * self.topk * batch.layout.etp

    def held(self, batch: MicroBatch) -> Held:
        """Return what is held. Of the experts that is the output of their first product; the rest is computed again."""
        layout, itemsize, copies = batch.layout, batch.itemsize, self._copies(batch)
        hidden, rows = batch.hidden(self.hidden_size), copies * self.hidden_size * itemsize
        inner = (2 if self.is_gated else 1) * self._columns(batch)
        # Ids and weights of the chosen experts; expert, token, places and weight of each row.
        routing = batch.local * self.topk * (5 * INT64 + 2 * FP32)
        received = copies * (4 * INT64 + 3 * FP32) + rows if layout.ep * layout.etp > 1 else 0
        saved = routing + received + inner + self._scores(batch)
        if self.has_bias:  # which expert a row has: a bool, twice a number, and that times the row's weight
            saved += copies * self.num_experts // layout.ep * (1 + 3 * itemsize)
        shared = activation_width(self.shared_ffn_hidden_size, "silu", self.is_gated)
        saved += batch.tokens * shared // layout.tp * itemsize

        peak = routing + received + inner + self._beside(batch, inner, rows)
        peak += hidden if self.shared_ffn_hidden_size else 0
        if layout.etp > 1:  # before the ranks that divide experts gather them
            peak += rows // layout.etp
        return Held(saved, peak, backward=self._backward(batch, inner, rows))

    def _columns(self, batch: MicroBatch) -> int:
        """Return the bytes of the activation of a rank's experts."""
        return self._copies(batch) * self.ffn_hidden_size // batch.layout.etp * batch.itemsize

    def _beside(self, batch: MicroBatch, inner: int, rows: int) -> int:
        """Return the most bytes beside the output of the first product, without gradients."""
        columns, hidden = self._columns(batch), batch.hidden(self.hidden_size)
        if self._has_adapters(batch, "gate_proj", "up_proj"):  # the sum of the product and its updates
            return rows + 2 * inner
        if not batch.on_gpu:  # activations are those of one expert at a time; what biases are added to
            return rows + hidden + rows * self.has_bias
        # The input of the second product and its output; or steps of the activation, with weights in fp32.
        steps = {"silu": 1.0, "clamped_swiglu": 4.0}.get(self.activation[0], 1.0 + FP32 / batch.itemsize)
        return max(rows + columns, int(steps * columns))

    def _backward(self, batch: MicroBatch, inner: int, rows: int) -> int:
        """Return what the backward pass holds besides what is kept and two hidden states."""
        columns = self._columns(batch)
        if self._has_adapters(batch, *self._projections):
            return rows + 3 * columns
        if not batch.on_gpu:
            matrix = self.num_experts // batch.layout.ep * self.ffn_hidden_size // batch.layout.etp * self.hidden_size
            gradients = matrix * batch.itemsize if batch.itemsize < FP32 else 0  # not added to fp32 sums
            return max(0, 2 * rows + inner + gradients - 2 * batch.hidden(self.hidden_size))
        # Gradients of rows, and of the steps of the activation, which is computed again.
        name, is_fp32 = self.activation[0], batch.itemsize == FP32
        steps = 7.0 if name == "silu" else (7.0 if is_fp32 else 11.0) + (2.0 if name == "clamped_swiglu" else 0.0)
        return rows + int(steps * columns)

    def _scores(self, batch: MicroBatch) -> int:
        """Return what the router keeps of all experts."""
        of_experts = 0 if self.is_plain else self.num_experts
        if batch.moe is not None:
            # Probabilities and each one's weight; the logits.
            of_experts += self.num_experts * (2 * bool(batch.moe.aux_loss_coeff) + bool(batch.moe.z_loss_coeff))
        chosen = 0 if self.is_plain or not self.norm_topk_prob else self.topk + 1  # and their sum
        return batch.local * (of_experts + chosen) * FP32

    def _has_adapters(self, batch: MicroBatch, *names: str) -> bool:
        return batch.lora is not None and not {*names}.isdisjoint(batch.lora.targets)

    @property
    def _projections(self) -> set[str]:
        return {projection.name for weight in self.expert_weights() for projection in weight.projections}

    def kept_by_adapters(self, batch: MicroBatch) -> int:
        """Experts with adapters keep the input of each product that has some, and the steps of their activation."""
        total, lora, layout = super().kept_by_adapters(batch), batch.lora, batch.layout
        if lora is None or not self._has_adapters(batch, *self._projections):
            return total
        steps = {"silu": 0, "clamped_swiglu": 5}.get(self.activation[0], 2)
        has_received = layout.ep * layout.etp > 1
        width = (self._has_adapters(batch, "gate_proj", "up_proj") - has_received) * self.hidden_size
        width += (steps + self._has_adapters(batch, "down_proj")) * self.ffn_hidden_size // layout.etp
        width += len(self._projections & {*lora.targets}) * lora.rank
        return total + self._copies(batch) * width * batch.itemsize

    def computation(self, batch: MicroBatch) -> Computation:
        """Return the computation of the router and the shared experts, and the grouped products of the experts that
        tokens are sent to. Where each rank sends its own tokens, only shared experts need a sum of hidden states."""
        layout, linear, local = batch.layout, super().computation(batch), self.num_experts // batch.layout.ep
        rows = batch.tokens * self.topk * layout.etp / layout.tp
        tokens = batch.tokens * layout.etp * layout.ep / layout.tp  # of the group
        used = max(1.0, local * (1.0 - (1.0 - self.topk / self.num_experts) ** tokens))
        moved = 4.0 * (rows / layout.etp * self.hidden_size * batch.itemsize)  # sorted by expert, and back
        experts = matrices(self.parts(layout), are_experts=True)
        exchanges = self._exchanges(batch) if layout.tp == 1 or batch.shares_tokens else ()
        with_tokens = 0 if batch.on_gpu else min(local, batch.tokens * self.topk)
        return linear._replace(
            products=(*linear.products, Products(rows, experts, used, self._uneven(batch, rows), moved)),
            elementwise=3 * ((self.inner_width + self.shared_ffn_hidden_size) / layout.tp),
            reductions=0 if batch.shares_tokens and not self.shared_ffn_hidden_size else 1,
            exchanges=tuple(exchanges),
            launches=((MIXTURE, 1), (EXPERT, with_tokens)),
        )

    def _uneven(self, batch: MicroBatch, rows: float) -> float:
        """Return the rows of the expert-parallel rank that has the most, as a multiple of the mean: by chance, times
        the preference of routers for some experts."""
        ep = batch.layout.ep
        preferred = fullest_rank(ep, self.num_experts, batch.load_imbalance)
        return min(float(ep), most_of(ep, rows * ep) * preferred)

    def _exchanges(self, batch: MicroBatch) -> Iterator[Collective]:
        """Yield the collectives of `hpcrl.model.blocks.mixture_modules.Exchange`, of the rank with most tokens.

        Tokens go to the ranks of their experts, their probabilities in a message of their own, and back. Ranks that
        divide each expert gather both, and scatter sums in fp32. In the forward pass all ranks first gather the number
        of tokens of each expert. An engine's ranks have all tokens and exchange none.
        """
        layout = batch.layout
        rows = batch.tokens * self.topk / layout.tp
        most, hidden = rows * self._uneven(batch, rows * layout.etp), self.hidden_size
        for width in (hidden * batch.itemsize, hidden * batch.itemsize, FP32):
            yield Collective("all_to_all", most * width, ("ep",))
        for width in (hidden * batch.itemsize, FP32, hidden * FP32):
            yield Collective("all_gather", most * layout.etp * width, ("etp",))
        yield Collective("all_gather", INT64 * self.num_experts * layout.etp * layout.ep, ("etp", "ep"), times=1)


def fullest_rank(ranks: int, num_experts: int, imbalance: float) -> float:
    """Return the tokens of the expert-parallel rank that has the most, as a multiple of the mean.

    Experts' loads are taken to be independent and normal, so that the largest of n is m(n) standard deviations above
    the mean, with m(n) the normal quantile at (n - 3/8) / (n + 1/4) (Blom 1958). The mean of a rank's k experts has a
    standard deviation that is smaller by the square root of k.

    Args:
        imbalance: tokens of the expert that has the most, as a multiple of the mean.
    """
    if ranks < 2 or imbalance <= 1.0:
        return 1.0
    narrower = _largest(ranks) / _largest(num_experts) / math.sqrt(num_experts / ranks)
    return min(float(ranks), 1.0 + (imbalance - 1.0) * narrower)


def _largest(count: int) -> float:
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def most_of(ranks: int, balls: float) -> float:
    """Return the largest share of a rank as a multiple of the mean, of `balls` that are thrown at random:
    1 + sqrt(2 ln(n) (n - 1) / balls) (Raab and Steger 1998, theorem 1, the case of many balls)."""
    if ranks < 2 or balls <= 0:
        return 1.0
    return min(float(ranks), 1.0 + math.sqrt(2.0 * math.log(ranks) * (ranks - 1) / balls))
