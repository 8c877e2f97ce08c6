"""Ranks with a part of the vocabulary each draw what one rank with all of it does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcrl.model.exact import TensorParallel
from hpcrl.rollout.protocol import SamplingParams
from hpcrl.rollout.sampling import Sampled, sample, sample_sharded
from tests.covering import slow_but

LAYOUTS = [pytest.param("tp2", marks=pytest.mark.world(2)), pytest.param("tp4", marks=pytest.mark.world(4))]
WIDTH = 92
# FloatingPointError is meant to be told, not that the interpreter's NumPy has seen it
pytestmark = [pytest.mark.parametrize("layout", LAYOUTS), pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")]


def draw(roles, logits: Tensor, uniform: np.ndarray, vocab_size: int, sampling: SamplingParams) -> Sampled:
    tp = TensorParallel(roles.tp, roles.coord.tp, roles.layout.tp)
    part = logits.chunk(tp.size, dim=1)[tp.rank].clone()
    return sample_sharded(part, uniform, vocab_size, sampling, tp)


def make_rows(rows: int, vocab_size: int) -> tuple[Tensor, np.ndarray]:
    logits = 3 * torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(vocab_size))
    logits[::5, 3:] = -torch.inf  # whole ranks without a token
    logits[1::5, : vocab_size - 1] = -torch.inf
    logits[2::5] = 2.0
    return logits, np.random.default_rng(vocab_size).uniform(size=rows)


@pytest.mark.parametrize("temperature", slow_but(0.6, [1.0, 0.6, 0.0]))
@pytest.mark.parametrize("choice", ["torch", "triton"])
def test_ranks_draw_what_one_rank_draws(groups, layout, choice, temperature, monkeypatch) -> None:
    monkeypatch.setenv("HPCRL_KERNELS", choice)
    for vocab_size in (90, 55, 20):  # the last ranks have fewer ids, or none
        logits, uniform = make_rows(2000 if choice == "torch" else 10, vocab_size)
        sampling = SamplingParams(1, temperature=temperature)
        expected = sample(logits.clone(), uniform, vocab_size, sampling)
        found = draw(groups[layout], logits, uniform, vocab_size, sampling)
        ends = (logits[:, :vocab_size].double() / (temperature or 1)).softmax(-1).cumsum(-1)
        clear = (ends - torch.from_numpy(uniform)[:, None]).abs().amin(1) > (1e-6 if temperature else -1)
        assert torch.equal(found.token_ids[clear], expected.token_ids[clear])
        torch.testing.assert_close(found.log_probs[clear], expected.log_probs[clear], rtol=0, atol=1e-5)


def test_a_filter_has_logits_gathered(groups, layout) -> None:
    logits, uniform = make_rows(50, 90)
    sampling = SamplingParams(1, top_k=5, top_p=0.9)
    expected = sample(logits.clone(), uniform, 90, sampling)
    found = draw(groups[layout], logits, uniform, 90, sampling)
    assert torch.equal(found.token_ids, expected.token_ids) and torch.equal(found.log_probs, expected.log_probs)


@pytest.mark.parametrize("choice", ["torch", "triton"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_every_rank_says_that_logits_are_not_finite(groups, layout, choice, temperature, wrong, monkeypatch) -> None:
    monkeypatch.setenv("HPCRL_KERNELS", choice)
    logits, uniform = make_rows(3, 90)
    logits[1, 70] = wrong
    with pytest.raises(FloatingPointError, match="not finite"):
        draw(groups[layout], logits, uniform, 90, SamplingParams(1, temperature=temperature))
