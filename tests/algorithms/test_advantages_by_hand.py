"""Every advantage estimator on numbers that can be followed on paper."""

from __future__ import annotations

import math

import pytest
import torch

from hpcrl.algorithms import advantage


def tensor(rows: list) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def check(found: tuple[torch.Tensor, torch.Tensor], advantages: list, returns: list | None = None) -> None:
    torch.testing.assert_close(found[0], tensor(advantages), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(found[1], tensor(advantages if returns is None else returns), rtol=1e-7, atol=1e-9)


def outcome(name: str, scores: list[float], index: list, config: dict | None = None, lengths: list | None = None):
    """Of responses of the given lengths (1 each), the score on the first token."""
    lengths = lengths or [1] * len(scores)
    width = max(lengths)
    rewards = tensor([[score] + [0.0] * (width - 1) for score in scores])
    mask = tensor([[1.0] * length + [0.0] * (width - length) for length in lengths])
    return advantage(name, config, token_level_rewards=rewards, response_mask=mask, index=index)


def test_gae():
    """gamma 0.5, lam 0.5; the third token is a tool's: V_next and A_next pass it, its own reward does not count.

    t=3: A = 1 - 2 = -1. t=2: has the A of t=3. t=1: delta = 0.5 * 2 - 1 = 0, A = 0.25 * -1. t=0: delta = 0.5 - 0.5,
    A = 0.25 * -0.25. Mean of the three -0.4375, squares 0.375^2 + 0.1875^2 + 0.5625^2 = 0.4921875, over 2.
    """
    found = advantage(
        "gae",
        token_level_rewards=tensor([[0.0, 0.0, 9.0, 1.0]]),
        response_mask=torch.tensor([[1, 1, 0, 1]]),
        values=tensor([[0.5, 1.0, 7.0, 2.0]]),
        gamma=0.5,
        lam=0.5,
    )
    scale = 1 / math.sqrt(0.4921875 / 2 + 1e-8)
    advantages = [[0.375 * scale, 0.1875 * scale, -0.5625 * scale, -0.5625 * scale]]
    check(found, advantages, [[-0.0625 + 0.5, -0.25 + 1, -1 + 7, -1 + 2]])


def test_gae_without_discount_is_reward_to_go_minus_value():
    rewards, ones = tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3)
    _, returns = advantage("gae", token_level_rewards=rewards, response_mask=ones, values=tensor([[3.0, 1.0, 5.0]]))
    assert returns.tolist() == [[7.0, 6.0, 4.0]]


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized"])
def test_grpo(name):
    """Scores 1 and 3: mean 2, std sqrt 2. Alone: mean 0, std 1."""
    unit, alone = 1 / (math.sqrt(2) + 1e-6), 5 / (1 + 1e-6)
    found = outcome(name, [1.0, 5.0, 3.0], ["a", "b", "a"], lengths=[2, 2, 1])
    check(found, [[-unit, -unit], [alone, alone], [unit, 0.0]])
    dr_grpo = outcome(name, [1.0, 5.0, 3.0], ["a", "b", "a"], {"norm_adv_by_std_in_grpo": False})
    check(dr_grpo, [[-1.0], [5.0], [1.0]])


def test_gigpo():
    """Two samples of two turns with rewards 1, 2 and 0, 4, in states 7, 8 and 7, 9; gamma 0.5.

    Scores 3 and 4: centered -0.5 and 0.5. State 7: returns 1 + 1 = 2 and 0 + 2 = 2, mean 2. States 8 and 9 are of one
    turn. With another state 8 in place of 9: returns 2 and 4, centered -1 and 1. The third token is not the model's.
    """
    rewards = tensor([[0.0, 1.0, 0.0, 2.0], [0.0, 0.0, 0.0, 4.0]])
    given = {"token_level_rewards": rewards, "response_mask": torch.tensor([[1, 1, 0, 1]] * 2), "index": [3, 3]}
    config = {"norm_adv_by_std_in_grpo": False, "step_gamma": 0.5, "step_advantage_w": 2.0}
    apart = advantage("gigpo", config, **given, turn_states=torch.tensor([[0, 7, 0, 8], [0, 7, 0, 9]]))
    check(apart, [[-0.5, -0.5, 0.0, -0.5], [0.5, 0.5, 0.0, 0.5]])
    equal = advantage("gigpo", config, **given, turn_states=torch.tensor([[0, 7, 0, 8], [0, 7, 0, 8]]))
    check(equal, [[-0.5, -0.5, 0.0, -2.5], [0.5, 0.5, 0.0, 2.5]])
    unit, last = 0.5 / (math.sqrt(0.5) + 1e-6), 1 / (math.sqrt(2) + 1e-6)
    scaled = advantage("gigpo", {"step_gamma": 0.5}, **given, turn_states=torch.tensor([[0, 7, 0, 8]] * 2))
    check(scaled, [[-unit, -unit, 0.0, -unit - last], [unit, unit, 0.0, unit + last]])


def test_gdpo():
    """acc 0, 1 and format 3, 1 are both -u, u and u, -u with u = 0.5 sqrt 2; 2 acc + format is -u, u.

    Tokens -u, u, u, u: mean u / 2, squares (2.25 + 3 * 0.25) u^2 over 3 = u^2, so -1.5 and 0.5.
    """
    found = advantage(
        "gdpo",
        {"gdpo_reward_keys": ["acc", "format"], "gdpo_reward_weights": [2.0, 1.0]},
        token_level_rewards=torch.zeros(2, 3, dtype=torch.float64),
        response_mask=torch.tensor([[1, 0, 0], [1, 1, 1]]),
        index=[7, 7],
        reward_components={"format": tensor([3.0, 1.0]), "acc": tensor([0.0, 1.0]), "length": tensor([9.0, 8.0])},
    )
    torch.testing.assert_close(found[0], tensor([[-1.5, 0.0, 0.0], [0.5, 0.5, 0.5]]), rtol=1e-6, atol=1e-7)
    assert torch.equal(*found)


def test_grpo_passk():
    """Scores 1, 4, 2: the best leads by 2; mean 7/3, squares (16 + 25 + 1) / 9, over 2: std sqrt(7/3)."""
    check(outcome("grpo_passk", [1.0, 4.0, 2.0], [0, 0, 0]), [[0.0], [2 / (math.sqrt(7 / 3) + 1e-6)], [0.0]])
    plain = outcome("grpo_passk", [1.0, 4.0, 2.0], [0, 0, 0], {"norm_adv_by_std_in_grpo": False})
    check(plain, [[0.0], [2.0], [0.0]])


def test_reinforce_plus_plus():
    """gamma 0.5; the second token is a tool's, so G_0 = 1 + 0.5 * 4. Returns 3 and 4: mean 3.5, var 0.5."""
    rewards, mask = tensor([[1.0, 9.0, 4.0]]), torch.tensor([[1, 0, 1]])
    found = advantage("reinforce_plus_plus", {"gamma": 0.5}, token_level_rewards=rewards, response_mask=mask)
    white = 0.5 / math.sqrt(0.5 + 1e-8)
    check(found, [[-white, 0.0, white]], [[3.0, 0.0, 4.0]])


def test_reinforce_plus_plus_baseline():
    """Scores 1, 3 less their mean 2, and 5 alone less 0: -1, 1, 5 with mean 5/3, squares (64 + 4 + 100) / 9 over 2."""
    scale = 1 / math.sqrt(168 / 18 + 1e-8)
    found = outcome("reinforce_plus_plus_baseline", [1.0, 3.0, 5.0], ["a", "a", "b"])
    torch.testing.assert_close(found[0], tensor([[-8 / 3 * scale], [-2 / 3 * scale], [10 / 3 * scale]]))
    assert torch.equal(*found)


@pytest.mark.parametrize(("name", "alone"), [("rloo", 5.0), ("rloo_vectorized", 0.0)])
def test_rloo(name, alone):
    """Scores 1, 2, 6: each less the mean of the other two."""
    found = outcome(name, [1.0, 2.0, 6.0, 5.0], [0, 0, 0, 1])
    check(found, [[1 - 4.0], [2 - 3.5], [6 - 1.5], [alone]])


def test_opo():
    """Scores 1 and 4 of lengths 3 and 1: baseline (3 * 1 + 1 * 4) / 4 = 1.75. Alone: baseline 0."""
    found = outcome("opo", [1.0, 4.0, 5.0], [0, 0, 1], lengths=[3, 1, 2])
    check(found, [[-0.75, -0.75, -0.75], [2.25, 0.0, 0.0], [5.0, 5.0, 0.0]])


def test_remax():
    """The tool token's 9 does not count, and it has the return 2 behind it; only written tokens have the baseline."""
    found = advantage(
        "remax",
        token_level_rewards=tensor([[1.0, 9.0, 2.0]]),
        response_mask=torch.tensor([[1, 0, 1]]),
        reward_baselines=tensor([1.5]),
    )
    check(found, [[1.5, 2.0, 0.5]], [[3.0, 2.0, 2.0]])


def test_gpg():
    """Scores 1, 3, 0 with mean 4/3, and 4 alone: three of four are not 0, so alpha = 4/3."""
    found = outcome("gpg", [1.0, 3.0, 0.0, 4.0], [0, 0, 0, 1])
    torch.testing.assert_close(found[0], tensor([[-4 / 9], [20 / 9], [-16 / 9], [16 / 3]]))
    check(outcome("gpg", [0.0, 0.0], [0, 0]), [[0.0], [0.0]])


# two responses, of two tokens (pi 0.5 and 0.5, sum of squares 0.5: w = 1 - 1 + 0.5, W = 0.5, 1; G = 2, 2)
# and of one (pi 0.25, sum of squares 0.75: w = 1 - 0.5 + 0.75 = W; G = 4)
FIRST = (2 * 0.5 + 4 * 1.25) / (0.5 + 1.25)


def responses(mask: list, **more: torch.Tensor) -> dict:
    """The two, spread over the positions of the mask, with garbage in between."""
    spread = {"token_level_rewards": [0, 2, 4], "old_log_probs": [0.5, 0.5, 0.25], "sum_pi_squared": [0.5, 0.5, 0.75]}
    inside = torch.tensor(mask).bool()
    tensors = {name: tensor(mask).masked_scatter(inside, tensor(values)) for name, values in spread.items()}
    tensors["old_log_probs"] = tensors["old_log_probs"].log()  # of 0 in between
    return {**tensors, "response_mask": torch.tensor(mask), "index": ["a", "a"], **more}


def test_optimal_token_baseline():
    """At the second position only the first response is left: baseline 0 there, or its own return."""
    given = responses([[1, 1], [1, 0]])
    found = advantage("optimal_token_baseline", **given)
    check(found, [[2 - FIRST, 2.0], [4 - FIRST, 0.0]], [[2.0, 2.0], [4.0, 0.0]])
    found = advantage("optimal_token_baseline", {"handle_zero_tail": False}, **given)
    torch.testing.assert_close(found[0], tensor([[2 - FIRST, 0.0], [4 - FIRST, 0.0]]), rtol=1e-7, atol=1e-7)


def test_optimal_token_baseline_weighted():
    """rho = 2 makes the first w 4 * 0.5."""
    rho = tensor([[2.0, 1.0], [1.0, 0.0]])
    found, _ = advantage("optimal_token_baseline", **responses([[1, 1], [1, 0]], rollout_is_weights=rho))
    first = (2 * 2 + 4 * 1.25) / (2 + 1.25)
    torch.testing.assert_close(found, tensor([[2 - first, 2.0], [4 - first, 0.0]]))


def test_tir_optimal_token_baseline():
    """The same two responses with tool tokens anywhere: the first written tokens are compared with each other."""
    found = advantage("tir_optimal_token_baseline", **responses([[1, 0, 1], [0, 1, 0]]))
    check(found, [[2 - FIRST, 0.0, 2.0], [0.0, 4 - FIRST, 0.0]], [[2.0, 2.0, 2.0], [4.0, 4.0, 0.0]])
