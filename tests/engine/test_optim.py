"""The learning-rate schedule at hand-computed points, and Adam over moments of fewer bits."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch.optim.adamw import adamw

from hpcrl.algorithms.optimizers.adamw import MOMENTS
from hpcrl.config.schema import OptimConfig
from hpcrl.engine.optim import learning_rate
from hpcrl.engine.sharded_optimizer import dtypes_of, init_state


def rates(total: int, **fields: object) -> list[float]:
    optim = OptimConfig(lr=1.0, **fields)
    return [learning_rate(step, optim, total) for step in range(total + 1)]


def compact_adam(weights: list[torch.nn.Parameter], **dtypes: str) -> torch.optim.Optimizer:
    """AdamW at a learning rate of 0.1 and a decay of 0.01, with moments of these dtypes."""
    chosen = OptimConfig(betas=[0.9, 0.95], **dtypes).chosen()
    adam = chosen.make([{"params": weights, "lr": 0.1, "weight_decay": 0.01}], set())
    init_state(adam, dict.fromkeys(weights, dtypes_of(chosen, is_matrix=False)), counts=True)
    return adam


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


def test_moments_are_those_of_fp32_rounded_after_each_step():
    """Against the formulas of AdamW (Loshchilov and Hutter, 2019), in fp64 but for the rounding."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(1000))
    adam = compact_adam([weight], exp_avg_dtype="bfloat16")
    state = adam.state[weight]
    expected, first, second = weight.detach().double(), torch.zeros(1000).double(), torch.zeros(1000).double()
    for step in (1, 2, 3):
        weight.grad = torch.randn(1000)
        first = 0.9 * first + 0.1 * weight.grad
        second = 0.95 * second + 0.05 * weight.grad.double().square()
        expected *= 1 - 0.1 * 0.01
        expected -= 0.1 * (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
        first = first.bfloat16().double()
        adam.step()
        assert (state["exp_avg"].double() - first).abs().max() <= 2**-8 * first.abs().max()
        torch.testing.assert_close(weight.detach().double(), expected, rtol=0, atol=2e-3)
    assert [state[name].dtype for name in MOMENTS] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_tensors_at_once_have_the_bits_of_one_at_a_time(monkeypatch: pytest.MonkeyPatch, dtype: str):
    monkeypatch.setattr("hpcrl.algorithms.optimizers.adamw.ELEMENTS_IN_CACHE", 100)
    torch.manual_seed(0)
    shapes = [(64,), (5, 7), (1,), (40, 50), (0,), (3, 3)]  # in batches of 3, 1 and 2
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    adam = compact_adam(weights, exp_avg_dtype="bfloat16", exp_avg_sq_dtype=dtype)
    expected = [
        (weight.detach().clone(), *(each.clone() for each in adam.state[weight].values())) for weight in weights
    ]
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn(weight.shape)
        adam.step()
        for weight, (alone, step, first, second) in zip(weights, expected, strict=True):
            options = {"beta1": 0.9, "beta2": 0.95, "lr": 0.1, "weight_decay": 0.01, "eps": 1e-8}
            firsts, seconds = [first.float()], [second.float()]
            adamw(
                [alone],
                [weight.grad],
                firsts,
                seconds,
                [],
                [step],
                fused=True,
                amsgrad=False,
                maximize=False,
                **options,
            )
            first.copy_(firsts[0])
            second.copy_(seconds[0])
            found = (weight.detach(), *adam.state[weight].values())
            assert all(map(torch.equal, found, (alone, step, first, second)))


def test_moments_that_bf16_could_not_let_decay_are_refused():
    OptimConfig(exp_avg_dtype="bfloat16")
    OptimConfig(exp_avg_sq_dtype="bfloat16", betas=[0.9, 0.95])
    v = torch.ones((), dtype=torch.bfloat16) * 1.5
    assert (v.float() * 0.999).bfloat16() == v
    with pytest.raises(ValidationError, match="bfloat16 can follow decays up to"):
        OptimConfig(exp_avg_sq_dtype="bfloat16")
    with pytest.raises(ValidationError, match="no such state"):
        OptimConfig(exp_avg_dtype="bfloat16", optimizer="sgd")
