"""What holds for advantage estimators whatever the numbers are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.algorithms import advantages
from hpcrl.algorithms.aggregation import masked_whiten
from hpcrl.algorithms.parameters import make
from tests.algorithms.replicas import on_replicas
from tests.algorithms.verl_cases.advantages import ESTIMATORS, batch

GROUPED = [name for name, needs in ESTIMATORS.items() if "index" in needs]
TOKEN_BASELINES = ["optimal_token_baseline", "tir_optimal_token_baseline"]
OUTCOME = [name for name in GROUPED if name not in TOKEN_BASELINES]
SCALE_WITH_REWARDS = ["rloo", "rloo_vectorized", "opo", "remax", "gpg", *TOKEN_BASELINES]

KINDLESS = ("index", "response_mask")

Tensors = dict[str, Any]


def inputs(name: str, seed: int = 3, sizes: tuple[int, ...] = (4, 2, 3), width: int = 8) -> Tensors:
    """What the estimator needs, fp64: rewards on all tokens, tool tokens in the middle, an empty response."""
    found: Tensors = batch(seed, "dense", "float64", "int64", width, sizes)
    return {
        key: on_arrays(torch.from_numpy, found[key]) if key != "index" else found[key]
        for key in ("token_level_rewards", "response_mask", *ESTIMATORS[name])
    }


def on_arrays(change: Callable[[Any], Any], value: Any) -> Any:
    return {key: change(part) for key, part in value.items()} if isinstance(value, dict) else change(value)


def of_rows(tensors: Tensors, rows: np.ndarray) -> Tensors:
    return {key: on_arrays(lambda x: x[rows], value) for key, value in tensors.items()}


def of_scores(name: str, scores: list[float], index: list[int]) -> Tensors:
    """Responses of 3, 2, 3, ... tokens with a tool token inside the long ones; the score is on the last."""
    tensors = inputs(name, sizes=(len(scores),), width=4)
    long = torch.arange(len(scores)) % 2 == 0
    mask = torch.where(long[:, None], torch.tensor([[1, 0, 1, 1]]), torch.tensor([[1, 1, 0, 0]]))
    rewards = torch.zeros(len(scores), 4, dtype=torch.float64)
    rewards[torch.arange(len(scores)), torch.where(long, 3, 1)] = torch.tensor(scores, dtype=torch.float64)
    tensors |= {"token_level_rewards": rewards, "response_mask": mask}
    if "index" in tensors:
        tensors["index"] = index
    if "reward_components" in tensors:
        tensors["reward_components"] = {"score": rewards.sum(-1)}
    return tensors


def run(name: str, tensors: Tensors, **config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    estimator = advantages.ESTIMATORS.get(name)
    return estimator(**tensors, params=make(estimator.params, config))


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", GROUPED)
def test_what_all_of_a_group_get_more_does_not_matter(name):
    """No score is 0, neither before nor after: gpg's alpha counts those."""
    scores, index = [1.0, -2.0, 0.5, 4.0, 3.0, 2.0], [0, 0, 0, 1, 1, 1]
    more = [score + 10 - 4 * group for score, group in zip(scores, index, strict=True)]
    before, _ = run(name, of_scores(name, scores, index), handle_zero_tail=False)
    after, _ = run(name, of_scores(name, more, index), handle_zero_tail=False)
    close(before, after, 1e-5)
    assert before.abs().max() > 0.3


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in GROUPED])
def test_what_all_responses_get_more_does_not_matter(name):
    """Undiscounted: whitening takes it away, or the greedy response gets it too."""
    before, after = of_scores(name, [1.0, -2.0, 0.5, 4.0], []), of_scores(name, [11.0, 8.0, 10.5, 14.0], [])
    if name == "remax":
        after["reward_baselines"] = before["reward_baselines"] + 10
    valid = before["response_mask"].bool()
    close(run(name, before)[0][valid], run(name, after)[0][valid], 1e-7)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_scaled_rewards(name):
    """Advantages scale with the rewards, or not at all where something divides by their spread."""
    tensors = inputs(name)
    scaled = {
        key: on_arrays(lambda x: x * 8, value)
        if key in ("token_level_rewards", "values", "reward_baselines", "reward_components")
        else value
        for key, value in tensors.items()
    }
    close(run(name, scaled)[0], run(name, tensors)[0] * (8 if name in SCALE_WITH_REWARDS else 1), 1e-4)
    if name in ("grpo", "grpo_vectorized", "grpo_passk"):
        dr_grpo = [run(name, given, norm_adv_by_std_in_grpo=False)[0] for given in (scaled, tensors)]
        close(dr_grpo[0], dr_grpo[1] * 8)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_teach_nothing(name, dtype):
    """0.7 in a group of three: neither is a round number in binary."""
    tensors = of_scores(name, [0.7] * 6, [0, 0, 0, 1, 1, 1])
    same = {key: on_arrays(lambda x: x.to(dtype), tensors.pop(key)) for key in list(tensors) if key not in KINDLESS}
    advantages, _ = run(name, {**same, **tensors}, handle_zero_tail=False)
    assert advantages.abs().max() < 1e-6


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in GROUPED])
def test_equal_returns_teach_nothing(name):
    """Whitened, or equal to that of the greedy response."""
    constant = {"values": torch.zeros(4, 4), "reward_baselines": torch.full((4,), 0.7, dtype=torch.float64)}
    tensors = of_scores(name, [0.7] * 4, [])
    advantages, _ = run(name, tensors | {key: constant[key] for key in ESTIMATORS[name]})
    assert advantages[tensors["response_mask"].bool()].abs().max() < 1e-9


def test_a_group_of_one():
    """Quirks of verl: most keep the score, with a baseline of 0."""
    score = 3.0
    expected = dict.fromkeys(OUTCOME, score) | {
        "grpo": score / (1 + 1e-6),
        "grpo_vectorized": score / (1 + 1e-6),
        "rloo_vectorized": 0.0,
        "gdpo": 0.0,  # one response of one score, whitened
        "reinforce_plus_plus_baseline": 0.0,
        "optimal_token_baseline": score,
        "tir_optimal_token_baseline": score,
    }
    del expected["grpo_passk"]
    for name, value in expected.items():
        tensors = of_scores(name, [score], [5])
        advantages, _ = run(name, tensors)
        close(advantages, value * tensors["response_mask"].double(), 1e-6)
    with pytest.raises(ValueError, match="needs 2 samples per group; group 5 has 1"):
        run("grpo_passk", of_scores("grpo_passk", [score], [5]))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_empty_response_has_none_and_is_no_peer_of_tokens(name):
    """It counts where scores are compared, and is nothing where tokens are."""
    tensors = inputs(name)
    empty = tensors["response_mask"].sum(-1) == 0
    assert empty.any()
    advantages, returns = run(name, tensors)
    assert advantages.isfinite().all() and returns.isfinite().all()
    if name != "gae":
        assert advantages[empty].abs().max() == 0
    if "index" not in tensors or name == "tir_optimal_token_baseline":
        rest, _ = run(name, of_rows(tensors, (~empty).numpy()))
        close(rest, advantages[~empty])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_batch_of_empty_responses(name):
    tensors = inputs(name) | {"response_mask": torch.zeros(9, 8, dtype=torch.int64)}
    for result in run(name, tensors):
        assert result.isfinite().all()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_tool_token_in_the_middle_changes_nothing(name):
    """A column of masked tokens inserted in the middle: written tokens get what they got without it."""
    tensors = inputs(name)

    def insert(x: torch.Tensor, filling: float) -> torch.Tensor:
        column = torch.full((len(x), 1), filling, dtype=x.dtype)
        return torch.cat([x[:, :3], column, x[:, 3:]], dim=1)

    wider = {
        key: insert(x, 0 if key in ("token_level_rewards", "response_mask") else 1.5)
        if isinstance(x, torch.Tensor) and x.dim() == 2
        else x
        for key, x in tensors.items()
    }
    config = {"handle_zero_tail": name != "optimal_token_baseline"}  # whose tail begins at a count of tokens
    for before, after in zip(run(name, tensors, **config), run(name, wider, **config), strict=True):
        valid = tensors["response_mask"].bool()
        close(insert(before, 0.0)[insert(valid, False)], after[insert(valid, False)])


def test_tir_baseline_does_not_see_where_tool_tokens_stand():
    """Every response keeps its written tokens and gets its tool tokens in other places."""
    name = "tir_optimal_token_baseline"
    tensors = inputs(name)
    valid = tensors["response_mask"].bool()
    order = torch.argsort(~valid, dim=-1, stable=True)
    moved = {
        key: x.gather(-1, order) if isinstance(x, torch.Tensor) and x.dim() == 2 else x for key, x in tensors.items()
    }
    for before, after in zip(run(name, tensors), run(name, moved), strict=True):
        close(before[valid], after[moved["response_mask"].bool()])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_garbage_under_the_mask_poisons_nothing(name):
    tensors = inputs(name)
    masked = tensors["response_mask"] == 0
    tensors["token_level_rewards"] = tensors["token_level_rewards"].masked_fill(masked, 0.0)
    clean = run(name, tensors)
    for garbage in (math.nan, math.inf):
        dirty = {
            key: x.masked_fill(masked, garbage)
            if isinstance(x, torch.Tensor) and x.dim() == 2 and key != "response_mask"
            else x
            for key, x in tensors.items()
        }
        for before, after in zip(clean, run(name, dirty), strict=True):
            close(before[~masked], after[~masked])
            assert after.isfinite().all()


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_any_kind_of_mask(name, dtype):
    tensors = inputs(name)
    for a, b in zip(
        run(name, tensors), run(name, tensors | {"response_mask": tensors["response_mask"].to(dtype)}), strict=True
    ):
        close(a, b)


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), replicas=st.integers(2, 4))
def test_replicas_get_what_one_rank_gets(name, seed, replicas):
    """Groups stay together; a replica may have none of them."""
    tensors = inputs(name, seed, sizes=(3, 2, 4))
    uid = tensors.get("index", np.arange(9))
    owner = np.array([(seed + sum(map(ord, str(i)))) % replicas for i in uid])
    estimator = advantages.ESTIMATORS.get(name)
    params = make(estimator.params, {"gamma": 0.9, "lam": 0.8})
    whole = estimator(**tensors, params=params)

    def work(replica, reduce):
        return estimator(**of_rows(tensors, owner == replica), params=params, reduce=reduce)

    for replica, part in enumerate(on_replicas(replicas, work)):
        for mine, all_of_it in zip(part, whole, strict=True):
            close(mine, all_of_it[owner == replica])


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (2, 0)])
def test_empty_batches(name, shape):
    size, _ = shape
    columns: Tensors = {
        "index": ["a"] * size,
        "reward_baselines": torch.zeros(size),
        "reward_components": {"acc": torch.zeros(size)},
    }
    tensors = {
        key: columns.get(key, torch.zeros(shape)) for key in ("token_level_rewards", "response_mask", *ESTIMATORS[name])
    }
    for result in run(name, tensors):
        assert result.shape == shape and result.dtype == torch.float32


def test_whitening_is_over_all_written_tokens():
    """Not per response: long responses weigh more."""
    tensors = inputs("reinforce_plus_plus")
    advantages, returns = run("reinforce_plus_plus", tensors)
    close(advantages, masked_whiten(returns, tensors["response_mask"]) * tensors["response_mask"])
