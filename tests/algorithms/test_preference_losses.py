"""Preference losses: TRL's numbers, and cases by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcrl.algorithms.parameters import make
from hpcrl.algorithms.preference_losses import PREFERENCE_LOSSES, Kto, PairLogps, kto, log_odds
from tests.algorithms.trl_cases.preference import CASES

RECORDED = np.load(Path(__file__).parent / "trl_cases" / "preference.npz")
IN_FP32 = ("orpo", "dpo exo_pair")  # TRL casts log-probs, or the label smoothing


def pairs_of(policy: torch.Tensor, ref: torch.Tensor | None, mask: torch.Tensor) -> PairLogps:
    """policy, ref, mask: (2, B, T), chosen and rejected."""
    refs = (None, None) if ref is None else ref.sum(-1)
    return PairLogps(*policy.sum(-1), *refs, *mask.sum(-1))


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_trl(name: str) -> None:
    case = CASES[name]
    trainer, *_ = name.split()
    policy = torch.tensor(case["policy"], requires_grad=True)
    ref, mask = torch.tensor(case["ref"]), torch.tensor(case["mask"])
    if trainer == "kto":
        ratios = policy.sum(-1) - ref.sum(-1)
        kl = (ratios[1] + case["shift"]).mean().detach().clamp(min=0)
        assert (kl > 0) == (case["shift"] > 0)
        assert float(kl) == pytest.approx(float(RECORDED[f"{name}/kl"]), rel=1e-6)
        loss = kto(ratios[0], torch.tensor(case["labels"]) == 1, kl, make(Kto, case)).mean()
    else:
        loss_type = trainer if trainer == "orpo" else case["loss_type"]
        entry = PREFERENCE_LOSSES.get("cpo" if (trainer, loss_type) == ("cpo", "sigmoid") else loss_type)
        assert entry.reference == (trainer == "dpo")
        pairs = pairs_of(policy, ref if entry.reference else None, mask)
        loss = entry.function(pairs, make(entry.params, case)).mean()
        loss = loss - case.get("nll_weight", 0.0) * policy[0].sum() / mask[0].sum()
    loss.backward()
    tolerance = 1e-10 if policy.dtype == torch.float64 and not name.startswith(IN_FP32) else 1e-5
    np.testing.assert_allclose(loss.item(), RECORDED[f"{name}/loss"], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(policy.grad, RECORDED[f"{name}/gradient"], rtol=tolerance, atol=tolerance)


def one_pair(chosen: float, rejected: float, lengths: tuple[int, int] = (1, 1)) -> PairLogps:
    """Log-ratios of one pair, against a reference of log-prob 0."""
    values = (torch.tensor([value], dtype=torch.float64) for value in (chosen, rejected, 0.0, 0.0, *lengths))
    return PairLogps(*values)


def loss_of(loss_type: str, pair: PairLogps, **params: float) -> float:
    entry = PREFERENCE_LOSSES.get(loss_type)
    return float(entry.function(pair, make(entry.params, params)))


def test_conservative_dpo_by_hand() -> None:
    """The expectation of DPO's loss over labels that are swapped with the given probability."""
    pair, swapped = one_pair(-1.0, -3.0), one_pair(-3.0, -1.0)  # beta 0.5: rewards differ by 1
    plain = loss_of("sigmoid", pair, beta=0.5)
    assert plain == pytest.approx(math.log(1 + math.exp(-1)), abs=1e-12)
    smoothed = loss_of("sigmoid", pair, beta=0.5, label_smoothing=0.2)
    assert smoothed == pytest.approx(0.8 * plain + 0.2 * loss_of("sigmoid", swapped, beta=0.5), abs=1e-12)


def test_robust_dpo_is_unbiased_under_swapped_labels() -> None:
    pair, swapped = one_pair(-1.0, -3.0), one_pair(-3.0, -1.0)
    for share in (0.1, 0.4):
        robust = [loss_of("robust", its, beta=0.5, label_smoothing=share) for its in (pair, swapped)]
        mean = (1 - share) * robust[0] + share * robust[1]
        assert mean == pytest.approx(loss_of("sigmoid", pair, beta=0.5), abs=1e-12)


def test_lengths_matter_to_losses_per_token_only() -> None:
    for loss_type, entry in PREFERENCE_LOSSES.entries().items():
        if not entry.paired:
            continue
        params = {"label_smoothing": 0.1} if "label_smoothing" in entry.params.__dataclass_fields__ else {}
        short, long = (loss_of(loss_type, one_pair(-2.0, -3.0, lengths), **params) for lengths in ((1, 1), (4, 1)))
        assert (short != long) == entry.per_token, loss_type


def test_kto_by_hand() -> None:
    """Kahneman and Tversky's value of a reward of 1, above and below the reference point, with weights 2 and 3."""
    ratios, labels = torch.tensor([2.5, 2.5], dtype=torch.float64), torch.tensor([True, False])
    params = make(Kto, {"beta": 0.5, "desirable_weight": 2.0, "undesirable_weight": 3.0})
    found = PREFERENCE_LOSSES.get("kto").function(ratios, labels, torch.tensor(0.5, dtype=torch.float64), params)
    gain = 1 / (1 + math.exp(-1))
    assert found.tolist() == pytest.approx([2 * (1 - gain), 3 * gain], abs=1e-12)


def test_odds_are_accurate_at_both_ends() -> None:
    log_probs = torch.tensor([-1e-12, -1e-3, -0.5, -math.log(2), -0.9, -40.0], dtype=torch.float64)
    expected = [math.log(math.exp(x) / -math.expm1(x)) for x in log_probs.tolist()]
    np.testing.assert_allclose(log_odds(log_probs), expected, rtol=1e-12, atol=1e-12)


def test_exo_without_smoothing_is_refused() -> None:
    with pytest.raises(ValueError, match="exo_pair needs preference.label_smoothing above 0"):
        loss_of("exo_pair", one_pair(-1.0, -2.0))
