"""A mixture of experts. No torch; modules are in `router`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from hpcrl.model.blocks.block import Block, Feature, Weight
from hpcrl.model.blocks.feed_forward import gated_weights
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from torch import Tensor

    from hpcrl.model.blocks.attention_modules import Linear
    from hpcrl.model.blocks.router import MixtureStep
    from hpcrl.runtime.groups import RoleGroups


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
    of the experts that all tokens go to; 0: none. has_score_bias: the choice, not the weights, uses a bias per expert.
    Experts are in `num_groups` groups; a token chooses `topk_groups`, then experts inside them. A group's score is the
    sum of its `group_best` best scores.
    """

    num_experts: int
    ffn_hidden_size: int
    topk: int
    norm_topk_prob: bool = True
    shared_ffn_hidden_size: int = 0
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    has_score_bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    group_best: int = 1
    routed_scale: float = 1.0

    title: ClassVar[str] = "a mixture of experts"

    @property
    def supports(self) -> frozenset[Feature]:
        return frozenset(("adapters", "transformer_engine", "planned_cp"))

    @property
    def count_of_experts(self) -> int:
        return self.num_experts

    def weights(self) -> Iterator[Weight]:
        yield Weight("mlp.router.weight", (self.num_experts, self.hidden_size))
        if self.has_score_bias:
            yield Weight("mlp.router.expert_bias", (self.num_experts,), is_frozen=True)
        if self.shared_ffn_hidden_size:
            yield from gated_weights("mlp.shared_experts.", self.hidden_size, self.shared_ffn_hidden_size)

    def expert_weights(self) -> Iterator[Weight]:
        return gated_weights("", self.hidden_size, self.ffn_hidden_size)

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
            "num_moe_experts": self.num_experts,
            "moe_ffn_hidden_size": self.ffn_hidden_size,
            "moe_router_topk": self.topk,
            "moe_router_pre_softmax": not self.norm_topk_prob,
            "moe_router_score_function": self.score_function,
            "moe_router_topk_scaling_factor": self.routed_scale,
            "moe_shared_expert_intermediate_size": self.shared_ffn_hidden_size or None,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
        }

    def use(self, spec: ModuleSpec, groups: RoleGroups, *, exact: bool) -> None:
        from hpcrl.model.blocks.layers import use_swiglu
        from hpcrl.model.blocks.router import use_router

        use_router(spec, self, groups)
        use_swiglu(spec)

    def step(self, weight: Callable[[str], Tensor], linear: Linear, eps: float) -> MixtureStep:
        from hpcrl.model.blocks.router import MixtureStep

        return MixtureStep(self, weight, linear)
