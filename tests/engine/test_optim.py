"""The learning-rate schedule at hand-computed points."""

from __future__ import annotations

import pytest

from hpcrl.config.schema import OptimConfig
from hpcrl.engine.optim import learning_rate


def rates(total: int, **fields: object) -> list[float]:
    optim = OptimConfig(lr=1.0, **fields)
    return [learning_rate(step, optim, total) for step in range(total + 1)]


def test_constant_after_linear_warm_up():
    assert rates(5, lr_warmup_steps=2) == [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert rates(4, lr_warmup_steps_ratio=0.5, lr_warmup_init=0.5) == [0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(3) == [1.0] * 4


def test_linear_decay_to_min_lr():
    assert rates(5, lr_warmup_steps=1, lr_decay_style="linear", min_lr=0.2) == pytest.approx(
        [0.0, 1.0, 0.8, 0.6, 0.4, 0.2]
    )


def test_cosine_decay_ends_at_decay_steps():
    assert rates(6, lr_decay_style="cosine", lr_decay_steps=4) == pytest.approx(
        [1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0, 0.0], abs=1e-6
    )


def test_inverse_square_root():
    found = rates(16, lr_warmup_steps=4, lr_decay_style="inverse-square-root", min_lr=0.6)
    assert (found[4], found[9], found[16]) == pytest.approx((1.0, 2 / 3, 0.6))
