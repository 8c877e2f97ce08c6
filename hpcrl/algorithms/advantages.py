"""Advantage estimators by name: functions whose signature says what they need."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from hpcrl.algorithms.aggregation import Reduce, finite_outside, one_replica
from hpcrl.algorithms.parameters import Registry, flat_config, make, np, parameters_of, torch

if TYPE_CHECKING:
    from torch import Tensor

Result: TypeAlias = "tuple[Tensor, Tensor]"  # advantages and returns, both (B, T)
# The other keys of `algorithm`, which no estimator reads.
OTHER_KEYS = (
    *("adv_estimator", "use_kl_in_reward", "kl_penalty", "kl_ctrl", "use_pf_ppo", "pf_ppo"),
    *("filter_groups", "rollout_correction"),
)


@dataclass(frozen=True)
class AdvEstimator:
    """A registered estimator; its signature names the tensors and the parameters that it takes."""

    name: str
    function: Callable[..., Result]
    declaration: type | None

    @property
    def params(self) -> type:
        """Its parameter dataclass; of an estimator that declares none, that of all built-in estimators."""
        from hpcrl.algorithms.token_advantages import AlgorithmParameters

        return self.declaration or AlgorithmParameters

    @cached_property
    def _takes(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.function).parameters.values())[2:]

    @cached_property
    def settings(self) -> tuple[str, ...]:
        """The parameters that it takes one by one."""
        known = {parameter.name for parameter in parameters_of(self.params)}
        return tuple(taken.name for taken in self._takes if taken.name in known)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The tensors that it needs."""
        return tuple(name for name, is_required in self._tensors if is_required)

    @cached_property
    def optional(self) -> tuple[str, ...]:
        """The tensors that it uses if the batch has them."""
        return tuple(name for name, is_required in self._tensors if not is_required)

    @property
    def _tensors(self) -> list[tuple[str, bool]]:
        others = {*self.settings, "reduce", "params"}
        return [(taken.name, taken.default is taken.empty) for taken in self._takes if taken.name not in others]

    def __call__(
        self,
        token_level_rewards: Tensor,
        response_mask: Tensor,
        *,
        params: Any,
        reduce: Reduce = one_replica,
        **tensors: Any,
    ) -> Result:
        """Advantages and returns, both (B, T) in the dtype of the rewards; inputs are left as they are.

        NaN and infinities where the mask is 0 count as 0.

        Args:
            token_level_rewards: (B, T), right-padded with 0, integers count as fp32.
            response_mask: (B, T), 1 on tokens the model wrote.
            params: an instance of the estimator's parameter dataclass.
            reduce: sums fp64 tensors over the data-parallel replicas.
            tensors: all of `inputs`, some of `optional`, nothing else; one that is None counts as not given. They may
                be arrays and lists too. `index`: ids (B,), samples of one prompt share one and all of them are on this
                replica; `values`: (B, T), before each token; `reward_baselines`: (B,); `old_log_probs`,
                `sum_pi_squared`, `rollout_is_weights`: (B, T); `reward_components`: {key: (B,)}.
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
        options: dict[str, Any] = {name: getattr(params, name) for name in self.settings}
        whole = {"reduce": reduce, "params": params}
        options |= {taken.name: whole[taken.name] for taken in self._takes if taken.name in whole}
        with torch.no_grad():
            return self.function(finite_outside(token_level_rewards, response_mask), response_mask, **given, **options)

    def _check_names(self, given: Mapping[str, Any]) -> None:
        takes = (*self.inputs, *self.optional)
        for name in self.inputs:
            if name not in given:
                raise TypeError(f"adv_estimator={self.name} needs {name}; got {', '.join(given) or 'nothing else'}")
        for name in given:
            if name not in takes:
                wanted = ", ".join(takes) or "only token_level_rewards and response_mask"
                raise TypeError(f"adv_estimator={self.name} does not take {name}; it takes {wanted}")


def _tensor(value: Any, device: torch.device) -> Any:
    """Numbers of an array or a list as a tensor; anything else as it is."""
    if isinstance(value, np.ndarray | list | tuple) and np.asarray(value).dtype.kind in "biuf":
        return torch.as_tensor(value, device=device)
    return value


def _check_shapes(rewards: Tensor, mask: Tensor, given: Mapping[str, Any]) -> None:
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


ESTIMATORS: Registry[AdvEstimator] = Registry(
    "adv_estimator",
    *(f"hpcrl.algorithms.{unit}_advantages" for unit in ("outcome", "token")),
)


def register_adv_est(name: str, params: type | None = None) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Make `algorithm.adv_estimator=<name>` call the decorated function.

    The function gets (token_level_rewards, response_mask) and by keyword what its signature names: `params`, single
    fields of it, `reduce`, and tensors: required without a default, optional with one.

    Args:
        params: a frozen dataclass (see `hpcrl.algorithms.parameters`). Its keys are `algorithm.<name>.<field>`; fields
            that it inherits from a built-in declaration, such as `Gae`, have the values of `algorithm` unless set
            there.
    """

    def register(function: Callable[..., Result]) -> Callable[..., Result]:
        if params is not None:
            parameters_of(params)
        for parameter in list(inspect.signature(function).parameters.values())[2:]:
            if parameter.kind is not parameter.KEYWORD_ONLY:
                raise TypeError(f"adv_estimator {name!r} takes {parameter}; name each tensor it needs, after a *")
        ESTIMATORS.add(name, AdvEstimator(name, function, params))
        return function

    return register


def advantage(
    name: str,
    config: Mapping[str, Any] | None = None,
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    **tensors: Any,
) -> Result:
    """Advantages and returns, both (B, T), of a whole batch, by the estimator that the YAML calls `name`.

    >>> advantage("grpo", {"norm_adv_by_std_in_grpo": False}, token_level_rewards=r, response_mask=m, index=uid)

    Args:
        config: keys of verl's `algorithm` section, nested or dotted, or a whole config that has one; those that the
            estimator does not read are ignored, unknown ones are a ValueError.
        tensors: what the estimator needs (`AdvEstimator.__call__` says of which shape), and `gamma` and `lam` where it
            uses them, which win over the config; anything else is a TypeError.
    """
    from hpcrl.algorithms.token_advantages import AlgorithmParameters

    estimator = ESTIMATORS.get(name)
    own = [f"{name}.{parameter.name}" for parameter in parameters_of(estimator.params)]
    known = [*(parameter.name for parameter in parameters_of(AlgorithmParameters)), *own]
    settings = flat_config(config, "algorithm", known, OTHER_KEYS)
    settings = {key.rpartition(".")[2]: value for key, value in settings.items()}
    settings |= {key: tensors.pop(key) for key in ("gamma", "lam") if key in estimator.settings and key in tensors}
    return estimator(token_level_rewards, response_mask, params=make(estimator.params, settings), **tensors)
