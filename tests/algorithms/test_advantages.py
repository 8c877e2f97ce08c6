"""Advantage estimators: by hand, against plain loops, and split over replicas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.algorithms.advantages import (
    ESTIMATORS,
    AdvantageConfig,
    gae,
    get_adv_estimator,
    grpo,
    register_adv_est,
    reinforce_plus_plus,
    rloo,
)
from hpcrl.algorithms.masked import masked_whiten
from tests.algorithms.replicas import on_replicas

F64 = torch.float64
BUILT_IN = ("gae", "grpo", "rloo", "reinforce_plus_plus")


def tensor(rows: list, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.tensor(rows, dtype=dtype)


def random_batch(seed: int, size: int = 7, width: int = 9) -> tuple[torch.Tensor, ...]:
    """Rewards, mask (with tool tokens inside and empty rows), values, groups of unequal size."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, width + 1, size)
    inside = np.arange(width)[None] < lengths[:, None]
    mask = inside & (rng.random((size, width)) < 0.7)
    rewards = rng.normal(size=(size, width)) * inside
    values = rng.normal(size=(size, width)) * inside
    group = rng.integers(-2, 2, size)
    return tensor(rewards.tolist()), tensor(mask.tolist()), tensor(values.tolist()), torch.tensor(group)


def test_gae_by_hand_with_a_tool_token():
    """gamma 0.5, lam 0.5; the third token is a tool's: V_next and the accumulator pass it unchanged.

    t=3: delta = 1 - 2 = -1, A = -1. t=2: skipped. t=1: delta = 0 + 0.5 * 2 - 1 = 0, A = 0 + 0.25 * -1 = -0.25.
    t=0: delta = 0 + 0.5 * 1 - 0.5 = 0, A = 0.25 * -0.25 = -0.0625.
    """
    cfg = AdvantageConfig(gamma=0.5, lam=0.5)
    rewards, mask = tensor([[0.0, 0.0, 9.0, 1.0]]), tensor([[1, 1, 0, 1]])
    values = tensor([[0.5, 1.0, 7.0, 2.0]])
    advantages, returns = gae(rewards, mask, values=values, cfg=cfg)
    raw = tensor([[-0.0625, -0.25, 0.0, -1.0]])
    assert torch.allclose(returns, tensor([[0.4375, 0.75, 0.0, 1.0]]))
    assert torch.allclose(advantages, masked_whiten(raw, mask))
    assert advantages[0, 2] == 0


def test_gae_without_discount_is_reward_to_go_minus_value():
    rewards, mask, values = tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3), tensor([[1.0, 1.0, 1.0]])
    _, returns = gae(rewards, mask, values=values, cfg=AdvantageConfig(gamma=1.0, lam=1.0))
    assert returns.tolist() == [[7.0, 6.0, 4.0]]


def test_grpo_by_hand():
    """Group 4: scores 1, 3 (mean 2, std sqrt 2); group 9 is alone: mean 0, std 1."""
    rewards = tensor([[0.0, 1.0], [3.0, 0.0], [5.0, 0.0]])
    mask, group = tensor([[1, 1], [1, 0], [1, 1]]), torch.tensor([4, 4, 9])
    advantages, returns = grpo(rewards, mask, group=group, cfg=AdvantageConfig())
    unit = 1 / (math.sqrt(2) + 1e-6)
    alone = 5 / (1 + 1e-6)
    assert torch.allclose(advantages, tensor([[-unit, -unit], [unit, 0.0], [alone, alone]]), atol=1e-15)
    assert torch.equal(returns, advantages)
    dr_grpo, _ = grpo(rewards, mask, group=group, cfg=AdvantageConfig(norm_adv_by_std_in_grpo=False))
    assert torch.allclose(dr_grpo, tensor([[-1.0, -1.0], [1.0, 0.0], [5.0, 5.0]]))


def test_grpo_of_equal_scores_is_zero():
    rewards = torch.full((4, 2), 0.1)
    advantages, _ = grpo(rewards, torch.ones(4, 2), group=torch.zeros(4, dtype=torch.int64), cfg=AdvantageConfig())
    assert advantages.abs().max() == 0


def test_rloo_by_hand():
    """Scores 1, 2, 6 in a group: minus the mean of the other two; alone: the score itself."""
    rewards, mask = tensor([[1.0], [2.0], [6.0], [5.0]]), torch.ones(4, 1)
    advantages, returns = rloo(rewards, mask, group=torch.tensor([0, 0, 0, 1]), cfg=AdvantageConfig())
    assert torch.allclose(advantages, tensor([[1 - 4.0], [2 - 3.5], [6 - 1.5], [5.0]]))
    assert torch.equal(returns, advantages)


def test_reinforce_plus_plus_by_hand():
    """gamma 0.5; the second token is a tool's, so G_2 = 4 and G_0 = 2 + 0.5 * 4."""
    rewards, mask = tensor([[2.0, 9.0, 4.0]]), tensor([[1, 0, 1]])
    advantages, returns = reinforce_plus_plus(rewards, mask, cfg=AdvantageConfig(gamma=0.5))
    assert returns.tolist() == [[4.0, 0.0, 4.0]]
    assert advantages.tolist() == [[0.0, 0.0, 0.0]]
    _, returns = reinforce_plus_plus(tensor([[1.0, 1.0]]), torch.ones(1, 2), cfg=AdvantageConfig(gamma=0.5))
    assert returns.tolist() == [[1.5, 1.0]]


def whiten_loop(rows: list[list[float]], mask: list[list[float]]) -> list[list[float]]:
    valid = [x for row, m in zip(rows, mask, strict=True) for x, keep in zip(row, m, strict=True) if keep]
    if len(valid) < 2:
        return [[0.0] * len(row) for row in rows]
    mean = sum(valid) / len(valid)
    var = sum((x - mean) ** 2 for x in valid) / (len(valid) - 1)
    return [
        [(x - mean) / math.sqrt(var + 1e-8) * keep for x, keep in zip(row, m, strict=True)]
        for row, m in zip(rows, mask, strict=True)
    ]


def gae_loop(rewards, mask, values, gamma, lam):
    advantages, returns = [], []
    for r, m, v in zip(rewards, mask, values, strict=True):
        kept = [t for t in range(len(r)) if m[t]]
        row = [0.0] * len(r)
        for i, t in reversed(list(enumerate(kept))):
            following = kept[i + 1] if i + 1 < len(kept) else None
            next_value = v[following] if following is not None else 0.0
            next_advantage = row[following] if following is not None else 0.0
            row[t] = r[t] + gamma * next_value - v[t] + gamma * lam * next_advantage
        advantages.append(row)
        returns.append([row[t] + v[t] if m[t] else 0.0 for t in range(len(r))])
    return whiten_loop(advantages, mask), returns


def reinforce_loop(rewards, mask, gamma):
    returns = []
    for r, m in zip(rewards, mask, strict=True):
        kept = [t for t in range(len(r)) if m[t]]
        row = [0.0] * len(r)
        for i, t in enumerate(kept):
            row[t] = sum(gamma**j * r[u] for j, u in enumerate(kept[i:]))
        returns.append(row)
    return whiten_loop(returns, mask), returns


def group_loop(rewards, mask, group, advantage_of):
    scores = [sum(row) for row in rewards]
    rows = []
    for i, m in enumerate(mask):
        peers = [scores[j] for j in range(len(scores)) if group[j] == group[i]]
        rows.append([advantage_of(scores[i], peers) * keep for keep in m])
    return rows, rows


def grpo_score(score, peers):
    if len(peers) == 1:
        return score / (1 + 1e-6)
    return (score - np.mean(peers)) / (np.std(peers, ddof=1) + 1e-6)


def dr_grpo_score(score, peers):
    return score - (np.mean(peers) if len(peers) > 1 else 0.0)


def rloo_score(score, peers):
    n = len(peers)
    return score if n == 1 else score * n / (n - 1) - np.mean(peers) * n / (n - 1)


@given(st.integers(0, 2**31), st.floats(0, 1), st.floats(0, 1))
def test_against_plain_loops(seed, gamma, lam):
    rewards, mask, values, group = random_batch(seed)
    lists = rewards.tolist(), mask.tolist()
    cfg = AdvantageConfig(gamma=gamma, lam=lam)
    dr_grpo = AdvantageConfig(norm_adv_by_std_in_grpo=False)
    cases = [
        (gae(rewards, mask, values=values, cfg=cfg), gae_loop(*lists, values.tolist(), gamma, lam)),
        (reinforce_plus_plus(rewards, mask, cfg=cfg), reinforce_loop(*lists, gamma)),
        (grpo(rewards, mask, group=group, cfg=cfg), group_loop(*lists, group.tolist(), grpo_score)),
        (grpo(rewards, mask, group=group, cfg=dr_grpo), group_loop(*lists, group.tolist(), dr_grpo_score)),
        (rloo(rewards, mask, group=group, cfg=cfg), group_loop(*lists, group.tolist(), rloo_score)),
    ]
    for (advantages, returns), (naive_advantages, naive_returns) in cases:
        torch.testing.assert_close(advantages, tensor(naive_advantages), rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(returns, tensor(naive_returns), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", BUILT_IN)
@given(seed=st.integers(0, 2**31), replicas=st.integers(1, 4))
def test_replicas_get_what_one_rank_gets(name, seed, replicas):
    rewards, mask, values, group = (x.float() if x.is_floating_point() else x for x in random_batch(seed, size=10))
    owner = (group + 2) % replicas  # groups stay together
    cfg = AdvantageConfig(gamma=0.9, lam=0.8)
    estimator = get_adv_estimator(name)

    def work(replica, reduce):
        mine = owner == replica
        return estimator(rewards[mine], mask[mine], values=values[mine], group=group[mine], cfg=cfg, reduce=reduce)

    whole = estimator(rewards, mask, values=values, group=group, cfg=cfg)
    for replica, part in enumerate(on_replicas(replicas, work)):
        for mine, all_of_it in zip(part, whole, strict=True):
            torch.testing.assert_close(mine, all_of_it[owner == replica], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (2, 0)])
def test_empty_batches(name, shape):
    empty = torch.zeros(shape)
    group = torch.zeros(shape[0], dtype=torch.int64)
    advantages, returns = get_adv_estimator(name)(empty, empty, values=empty, group=group, cfg=AdvantageConfig())
    assert advantages.shape == returns.shape == shape and advantages.dtype == torch.float32


@pytest.mark.parametrize("name", BUILT_IN)
def test_padding_does_not_matter(name):
    rewards, mask, values, group = random_batch(3)

    def wider(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, 4))

    narrow = get_adv_estimator(name)(rewards, mask, values=values, group=group, cfg=AdvantageConfig())
    wide = get_adv_estimator(name)(
        wider(rewards), wider(mask), values=wider(values), group=group, cfg=AdvantageConfig()
    )
    for a, b in zip(narrow, wide, strict=True):
        torch.testing.assert_close(wider(a), b)


def test_estimators_say_what_they_need():
    needs = {name: (get_adv_estimator(name).needs_critic, get_adv_estimator(name).needs_groups) for name in BUILT_IN}
    assert needs == {
        "gae": (True, False),
        "grpo": (False, True),
        "rloo": (False, True),
        "reinforce_plus_plus": (False, False),
    }
    with pytest.raises(ValueError, match="needs the critic's values"):
        get_adv_estimator("gae")(torch.zeros(1, 1), torch.ones(1, 1), cfg=AdvantageConfig())
    with pytest.raises(ValueError, match="needs the group of each sample"):
        get_adv_estimator("grpo")(torch.zeros(1, 1), torch.ones(1, 1), cfg=AdvantageConfig())


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ValueError, match="unknown adv_estimator 'grppo'; did you mean 'grpo'") as caught:
        get_adv_estimator("grppo")
    assert caught.value.user_error is True and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="unknown adv_estimator 'zzz'; there are gae"):
        get_adv_estimator("zzz")


def test_ones_own_estimator():
    @register_adv_est("own")
    def own(token_level_rewards, response_mask, **_):
        return token_level_rewards * response_mask, token_level_rewards

    try:
        advantages, _ = get_adv_estimator("own")(torch.ones(1, 2), torch.ones(1, 2), cfg=AdvantageConfig())
        assert advantages.tolist() == [[1.0, 1.0]]
        with pytest.raises(ValueError, match="registered already"):
            register_adv_est("own")(own)
    finally:
        ESTIMATORS._entries.pop("own")
