"""What an advantage estimator is: a function whose signature says what it needs, under a name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import torch

from hpcrl.algorithms.config_keys import expect_numbers
from hpcrl.algorithms.masked import Reduce, finite_outside, one_replica
from hpcrl.algorithms.registry import Registry

Result: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # advantages and returns, both (B, T)


@dataclass(frozen=True)
class AdvantageConfig:
    """The settings of all estimators; each takes those that its signature names. Names and defaults are verl's."""

    gamma: float = 1.0  # discount per token
    lam: float = 1.0  # lambda of GAE
    norm_adv_by_std_in_grpo: bool = True  # divide by the group's standard deviation; False is Dr.GRPO
    gdpo_reward_keys: Sequence[str] | None = None  # the reward components that gdpo adds up; None: all that are given
    gdpo_reward_weights: Sequence[float] | None = None  # one per key; None: 1 each
    handle_zero_tail: bool = True  # no token baseline where only a group's longest response is left

    def __post_init__(self) -> None:
        weights = () if self.gdpo_reward_weights is None else self.gdpo_reward_weights
        expect_numbers([("gamma", self.gamma), ("lam", self.lam), *(("a gdpo_reward_weight", w) for w in weights)])
        for name in ("norm_adv_by_std_in_grpo", "handle_zero_tail"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise TypeError(f"{name} is {getattr(self, name)!r}; expected true or false")
        if isinstance(self.gdpo_reward_keys, str):
            raise TypeError(f"gdpo_reward_keys is {self.gdpo_reward_keys!r}; expected a list of keys")


SETTINGS = frozenset(field.name for field in fields(AdvantageConfig))


@dataclass(frozen=True)
class AdvEstimator:
    """A registered estimator and what it asks for, read off its signature."""

    name: str
    function: Callable[..., Result]
    inputs: tuple[str, ...]
    optional: tuple[str, ...]
    settings: tuple[str, ...]
    takes_reduce: bool

    @property
    def needs_critic(self) -> bool:
        return "values" in self.inputs

    @property
    def needs_groups(self) -> bool:
        return "index" in self.inputs

    @torch.no_grad()
    def __call__(
        self,
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        *,
        cfg: AdvantageConfig,
        reduce: Reduce = one_replica,
        **tensors: Any,
    ) -> Result:
        """Advantages and returns, both (B, T) in the dtype of the rewards; inputs are left as they are.

        token_level_rewards: (B, T), right-padded with 0, integers count as fp32. response_mask: (B, T), 1 on tokens
        the model wrote.
        tensors: all of `inputs`, some of `optional`, nothing else; one that is None counts as not given:
        index: ids (B,), samples of one prompt share one and all of them are on this replica; values: (B, T), before
        each token; reward_baselines: (B,); old_log_probs, sum_pi_squared, rollout_is_weights: (B, T);
        reward_components: {key: (B,)}. They may be arrays and lists too. reduce: sums fp64 tensors over the
        data-parallel replicas.
        NaN and infinities where the mask is 0 count as 0.
        """
        for name, value in (("token_level_rewards", token_level_rewards), ("response_mask", response_mask)):
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"{name} is a {type(value).__name__}; expected a tensor (samples, tokens)")
        if not token_level_rewards.is_floating_point():
            token_level_rewards = token_level_rewards.float()
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        self._check_names(given)
        device = token_level_rewards.device
        given = {name: value if name == "index" else _tensor(value, device) for name, value in given.items()}
        _check_shapes(token_level_rewards, response_mask, given)
        for name, tensor in given.items():
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 2:
                given[name] = finite_outside(tensor, response_mask)
        options: dict[str, Any] = {name: getattr(cfg, name) for name in self.settings}
        if self.takes_reduce:
            options["reduce"] = reduce
        return self.function(finite_outside(token_level_rewards, response_mask), response_mask, **given, **options)

    def _check_names(self, given: Mapping[str, Any]) -> None:
        takes = (*self.inputs, *self.optional)
        for name in self.inputs:
            if name not in given:
                raise TypeError(f"adv_estimator={self.name} needs {name}; got {', '.join(given) or 'nothing else'}")
        for name in given:
            if name not in takes:
                wanted = ", ".join(takes) or "token_level_rewards and response_mask alone"
                raise TypeError(f"adv_estimator={self.name} has no use for {name}; it takes {wanted}")


def _tensor(value: Any, device: torch.device) -> Any:
    """Numbers of an array or a list as a tensor; anything else as it is."""
    if isinstance(value, np.ndarray | list | tuple) and np.asarray(value).dtype.kind in "biuf":
        return torch.as_tensor(value, device=device)
    return value


def _check_shapes(rewards: torch.Tensor, mask: torch.Tensor, given: Mapping[str, Any]) -> None:
    if rewards.dim() != 2 or mask.shape != rewards.shape:
        found = f"token_level_rewards {tuple(rewards.shape)} and response_mask {tuple(mask.shape)}"
        raise ValueError(f"{found}; expected one shape (samples, tokens)")
    for name, value in given.items():
        if name == "index":
            if getattr(value, "ndim", 1) != 1:
                raise ValueError(f"index is {tuple(value.shape)}; expected one id per sample, ({len(rewards)},)")
            if len(value) != len(rewards):
                raise ValueError(f"index has the groups of {len(value)} samples; there are {len(rewards)}")
        elif isinstance(value, torch.Tensor) and value.shape != rewards.shape[: max(value.dim(), 1)]:
            raise ValueError(f"{name} is {tuple(value.shape)} beside token_level_rewards {tuple(rewards.shape)}")


ESTIMATORS: Registry[AdvEstimator] = Registry("adv_estimator")


def register_adv_est(name: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Makes `algorithm.adv_estimator=<name>` call the decorated function.

    It gets (token_level_rewards, response_mask) and by keyword what its signature names: fields of `AdvantageConfig`,
    `reduce`, and tensors: required without a default, optional with one.
    """

    def register(function: Callable[..., Result]) -> Callable[..., Result]:
        parameters = list(inspect.signature(function).parameters.values())[2:]
        for parameter in parameters:
            if parameter.kind is not parameter.KEYWORD_ONLY:
                raise TypeError(f"adv_estimator {name!r} takes {parameter}; name each tensor it needs, after a *")
        tensors = [parameter for parameter in parameters if parameter.name not in SETTINGS | {"reduce"}]
        estimator = AdvEstimator(
            name,
            function,
            inputs=tuple(p.name for p in tensors if p.default is p.empty),
            optional=tuple(p.name for p in tensors if p.default is not p.empty),
            settings=tuple(p.name for p in parameters if p.name in SETTINGS),
            takes_reduce=any(p.name == "reduce" for p in parameters),
        )
        ESTIMATORS.add(name, estimator)
        return function

    return register
