"""Advantage estimators with one number per response, which all its tokens share.

A response's score is the sum of its token rewards, those of tool tokens included (verl does not mask them); advantage
and return are the same, 0 where the mask is 0. Statistics of a group are taken in fp64, whatever the rewards are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hpcrl.algorithms.advantages import Result, register_adv_est
from hpcrl.algorithms.aggregation import Reduce, masked_whiten, one_replica
from hpcrl.algorithms.parameters import np, param, torch

if TYPE_CHECKING:
    from torch import Tensor

GroupIds: TypeAlias = "Tensor | np.ndarray | list[Any] | tuple[Any, ...]"


def group_numbers(index: GroupIds, device: torch.device) -> Tensor:
    """int64 (B,): 0, 1, ... in the order in which the ids of `index` (B,) first appear; equal ids, equal numbers.

    Ids are anything hashable: integers, strings, both mixed; tensors, of all ids or of one, count by their values.
    """
    ids: Iterable[Any] = index.tolist() if isinstance(index, torch.Tensor | np.ndarray) else index
    ids = (i.item() if isinstance(i, torch.Tensor | np.ndarray) else i for i in ids)
    numbers: dict[Any, int] = {}
    return torch.tensor([numbers.setdefault(i, len(numbers)) for i in ids], dtype=torch.int64, device=device)


class Moments(NamedTuple):
    """Of each sample's group, fp64 (B,): size, mean, standard deviation (n - 1; 0 in a group of one)."""

    size: Tensor
    mean: Tensor
    std: Tensor


def group_moments(score: Tensor, group: Tensor) -> Moments:
    """Return size, mean and standard deviation of each sample's group.

    Args:
        score: (B,).
        group: int64 (B,), the number of each sample's group.
    """
    size = torch.bincount(group).double()
    mean = group_sum(score, group) / size
    squares = group_sum((score.double() - mean[group]).square(), group)
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    return Moments(size[group], mean[group], std[group])


def group_sum(x: Tensor, group: Tensor) -> Tensor:
    """Return sums over each group's samples of x (B, ...), fp64 (G, ...).

    Args:
        group: as in `group_moments`.
    """
    count = int(group.max()) + 1 if len(group) else 0
    return x.new_zeros((count, *x.shape[1:]), dtype=torch.float64).index_add(0, group, x.double())


def two_best(score: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of each group's highest and second highest score, int64 (G,) both; the same row in a group of one.

    Of equal scores the earlier row comes first.
    """
    by_score = torch.argsort(score, descending=True, stable=True)
    order = by_score[torch.argsort(group[by_score], stable=True)]
    size = torch.bincount(group)
    start = size.cumsum(0) - size
    return order[start], order[start + (size > 1)]


@dataclass(frozen=True)
class Grpo:
    norm_adv_by_std_in_grpo: bool = param(True, help="divide by the group's deviation; false is Dr.GRPO")


@register_adv_est("grpo", params=Grpo)
@register_adv_est("grpo_vectorized", params=Grpo)
def grpo(
    token_level_rewards: Tensor, response_mask: Tensor, *, index: GroupIds, norm_adv_by_std_in_grpo: bool
) -> Result:
    """Group-relative advantage (Shao et al. 2024, arXiv 2402.03300, section 4.1.2).

    A_i = (R_i - mean_g) / (std_g + 1e-6), std with n - 1.
    Without norm_adv_by_std_in_grpo: R_i - mean_g (Dr.GRPO, Liu et al. 2025, arXiv 2503.20783).
    Quirk of verl: a group of one has mean 0 and std 1, so its advantage is its score; its 1 + 1e-6 is one of fp32.
    `grpo_vectorized` is verl's name of a faster version. Quirks of it that are not followed: group statistics in fp32
    under fp64 rewards, and a trainer that never hands norm_adv_by_std_in_grpo to it: leave it True for verl's result.
    """
    advantage = _standardized(_score(token_level_rewards), _groups(index, response_mask), norm_adv_by_std_in_grpo)
    return _on_every_token(advantage, token_level_rewards, response_mask)


@dataclass(frozen=True)
class Gdpo(Grpo):
    gdpo_reward_keys: list[str] = param([], help="gdpo: keys of the scorer's result, whose values are added up")
    gdpo_reward_weights: list[float] | None = param(None, help="gdpo: weight of each key; null: 1")


@register_adv_est("gdpo", params=Gdpo)
def gdpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    index: GroupIds,
    reward_components: Mapping[str, Tensor],
    gdpo_reward_keys: Sequence[str] | None,
    gdpo_reward_weights: Sequence[float] | None,
    norm_adv_by_std_in_grpo: bool,
    reduce: Reduce = one_replica,
) -> Result:
    """GDPO (arXiv 2601.05242): each reward component is normalised by itself, so that none dominates.

    A = whiten(sum_k w_k GRPO(r_k)), whitened over the tokens of all replicas.
    Quirk of verl: the token rewards are not read, so a KL penalty in them is lost.
    Quirks of verl that are not followed: its trainer never hands norm_adv_by_std_in_grpo to this estimator: leave it
    True for verl's result; and values that are all equal, whitened, are its fp32 rounding error x 1e4, here 0.

    Args:
        reward_components: {key: r_k (B,)}.
    """
    group = _groups(index, response_mask)
    components = _components(reward_components, gdpo_reward_keys, len(response_mask))
    weights = [1.0] * len(components) if gdpo_reward_weights is None else list(gdpo_reward_weights)
    if len(weights) != len(components):
        raise ValueError(f"gdpo_reward_weights has {len(weights)} numbers for {len(components)} reward components")
    advantage = torch.zeros(len(response_mask), dtype=torch.float64, device=response_mask.device)
    for weight, component in zip(weights, components, strict=True):
        advantage = advantage + weight * _standardized(component.to(group.device), group, norm_adv_by_std_in_grpo)
    white = masked_whiten(advantage[:, None].expand(response_mask.shape), response_mask, reduce)
    return _twice((white * response_mask).to(token_level_rewards.dtype))


@register_adv_est("grpo_passk", params=Grpo)
def grpo_passk(
    token_level_rewards: Tensor, response_mask: Tensor, *, index: GroupIds, norm_adv_by_std_in_grpo: bool
) -> Result:
    """Pass@k (Tang et al. 2025, arXiv 2503.19595): only the best response of a group has an advantage.

    It is R_best - R_second, over (std_g + 1e-6) with norm_adv_by_std_in_grpo. A group of one is a ValueError, unless
    the mask is 0 for some samples, which failed; then its advantage is 0.
    """
    score, group = _score(token_level_rewards), _groups(index, response_mask)
    size, _, std = group_moments(score, group)
    if (size < 2).any() and response_mask.any(1).all():
        single = index[int((size < 2).nonzero()[0])]
        raise ValueError(f"grpo_passk needs 2 samples per group; group {single} has 1; raise rollout.n")
    best, second = two_best(score, group)
    lead = score[best] - score[second]
    if norm_adv_by_std_in_grpo:
        lead = lead / (std[best] + 1e-6)
    advantage = torch.zeros_like(score).index_copy(0, best, lead).masked_fill(size < 2, 0.0)
    return _on_every_token(advantage, token_level_rewards, response_mask)


@register_adv_est("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(
    token_level_rewards: Tensor, response_mask: Tensor, *, index: GroupIds, reduce: Reduce = one_replica
) -> Result:
    """REINFORCE++ with the group's mean as baseline (Hu et al. 2025, arXiv 2501.03262), whitened over all tokens.

    A = whiten(R_i - mean_g). Quirk of verl: a group of one has mean 0. One that is not followed: values that are all
    equal, whitened, are its fp32 rounding error x 1e4, here 0.
    """
    score, group = _score(token_level_rewards), _groups(index, response_mask)
    advantage = score - _mean_of_many(score, group)
    white = masked_whiten(advantage[:, None].expand(response_mask.shape), response_mask, reduce)
    return _twice((white * response_mask).to(token_level_rewards.dtype))


@register_adv_est("rloo")
def rloo(token_level_rewards: Tensor, response_mask: Tensor, *, index: GroupIds) -> Result:
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740).

    A_i = R_i - mean of the others = n / (n - 1) (R_i - mean_g); a group of one keeps R_i.
    """
    score = _score(token_level_rewards)
    size, mean, _ = group_moments(score, _groups(index, response_mask))
    advantage = torch.where(size > 1, (score - mean) * size / (size - 1).clamp(min=1), score)
    return _on_every_token(advantage, token_level_rewards, response_mask)


@register_adv_est("rloo_vectorized")
def rloo_vectorized(token_level_rewards: Tensor, response_mask: Tensor, *, index: GroupIds) -> Result:
    """`rloo`, except (quirk of verl) that a group of one has advantage 0 instead of its score."""
    score = _score(token_level_rewards)
    size, mean, _ = group_moments(score, _groups(index, response_mask))
    advantage = (score - mean) * size / (size - 1).clamp(min=1)
    return _on_every_token(advantage.masked_fill(size == 1, 0.0), token_level_rewards, response_mask)


@register_adv_est("opo")
def opo(token_level_rewards: Tensor, response_mask: Tensor, *, index: GroupIds) -> Result:
    """On-policy optimal baseline (Hao et al. 2025, arXiv 2505.23585): A_i = R_i - sum(L R) / sum(L).

    L is the number of tokens the model wrote, sums are over the group. Quirk of verl: a group of one has baseline 0.
    One that is not followed: a group without any token is 0 / 0 there, NaN on its masked tokens; here it is 0.
    """
    score, group = _score(token_level_rewards), _groups(index, response_mask)
    length = response_mask.double().sum(-1)
    baseline = group_sum(length * score, group) / group_sum(length, group).clamp(min=1)
    is_single = torch.bincount(group) == 1
    advantage = score - baseline.masked_fill(is_single, 0.0)[group]
    return _on_every_token(advantage, token_level_rewards, response_mask)


@register_adv_est("gpg")
def gpg(token_level_rewards: Tensor, response_mask: Tensor, *, index: GroupIds, reduce: Reduce = one_replica) -> Result:
    """Group policy gradient (Chu et al. 2025, arXiv 2504.02546): A_i = alpha (R_i - mean_g).

    alpha = samples / samples with R != 0, over all replicas, at most the number of samples.
    Quirks of verl: a group of one has mean 0; alpha is the fp32 product of samples and a reciprocal, fp64 or not.
    """
    score, group = _score(token_level_rewards), _groups(index, response_mask)
    samples, scored = reduce(torch.stack([torch.ones_like(score).sum(), (score != 0).double().sum()]))
    alpha = scored.clamp(min=1).float().reciprocal() * samples.float()
    advantage = alpha * (score - _mean_of_many(score, group))
    return _on_every_token(advantage, token_level_rewards, response_mask)


def _score(token_level_rewards: Tensor) -> Tensor:
    """R (B,), fp64, summed in the dtype of the rewards: equal scores must stay equal, as they do in verl."""
    return token_level_rewards.sum(-1).double()


def _groups(index: GroupIds, response_mask: Tensor) -> Tensor:
    return group_numbers(index, response_mask.device)


def _standardized(score: Tensor, group: Tensor, by_std: bool) -> Tensor:
    """(R - mean_g) / (std_g + 1e-6), or R - mean_g; fp64 (B,). A group of one has mean 0 and std 1 (in fp32)."""
    size, mean, std = group_moments(score, group)
    centered = score.double() - mean.masked_fill(size == 1, 0.0)
    divisor = torch.where(size == 1, torch.ones_like(std).float() + 1e-6, std + 1e-6)
    return centered / divisor if by_std else centered


def _mean_of_many(score: Tensor, group: Tensor) -> Tensor:
    """The group's mean, 0 in a group of one; fp64 (B,)."""
    size, mean, _ = group_moments(score, group)
    return mean.masked_fill(size == 1, 0.0)


def _components(given: Mapping[str, Tensor], keys: Sequence[str] | None, samples: int) -> list[Tensor]:
    """The rewards (B,) that gdpo adds up, in the order of the keys; all that are given where there are none."""
    for key in keys or ():
        if key not in given:
            raise ValueError(f"gdpo_reward_keys names {key!r}; the scorer returned {', '.join(given) or 'none'}")
    if not given:
        raise ValueError("reward_components is empty; gdpo needs one (samples,) tensor per component")
    chosen = [torch.as_tensor(given[key]) for key in keys or given]
    for component in chosen:
        if component.shape != (samples,):
            given_shape = f"a reward component of shape {tuple(component.shape)}"
            raise ValueError(f"{given_shape}; expected one number for each of {samples} samples")
    return chosen


def _on_every_token(advantage: Tensor, token_level_rewards: Tensor, response_mask: Tensor) -> Result:
    """(B,) onto the valid tokens (B, T), as advantages and as returns."""
    return _twice((advantage[:, None] * response_mask).to(token_level_rewards.dtype))


def _twice(advantages: Tensor) -> Result:
    return advantages, advantages.clone()
