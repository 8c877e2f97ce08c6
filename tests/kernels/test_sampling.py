from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcrl.kernels.sampling import partials, sample
from hpcrl.kernels.sampling_triton import CHUNK
from hpcrl.rollout.protocol import SamplingParams
from hpcrl.rollout.sampling import sample as checked_sample
from tests.kernels.close import DTYPES

ROWS = 4000 if torch.cuda.is_available() else 30  # the interpreter takes its time for each
# numbers that are not finite are meant to be told, not that the interpreter's NumPy has seen them
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
FILTERS = ((1, 1.0), (37, 1.0), (-1, 0.8), (200, 0.95), (10**6, 0.1))
CLOSE = 1e-6  # to a boundary; fp32 exponentials differ


def reference(logits: Tensor, uniform: Tensor, *rest: float) -> tuple[Tensor, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCRL_KERNELS", "torch")
        return sample(logits.clone(), uniform, *rest)  # type: ignore[arg-type]


def is_clear(logits: Tensor, uniform: Tensor, size: int, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Which rows have no boundary CLOSE to what decides, bool (n,); in fp64, of the kept tokens in id order."""
    if temperature == 0:
        return torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    probs = (logits[:, :size].float() / temperature).double().softmax(-1)
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    if top_k != -1:
        ordered[:, top_k:] = 0
    ordered /= ordered.sum(-1, keepdim=True)
    before = ordered.cumsum(-1) - ordered
    clear = ((before - top_p).abs() > CLOSE).all(-1) if top_p < 1 else torch.ones_like(uniform, dtype=torch.bool)
    ordered[before >= top_p] = 0
    ends = torch.zeros_like(probs).scatter_(-1, ids, ordered / ordered.sum(-1, keepdim=True)).cumsum(-1)
    return clear & ((ends - uniform[:, None]).abs() > CLOSE).all(-1)


def assert_draws_as_the_reference(logits: Tensor, uniform: Tensor, size: int, *sampling: float) -> None:
    expected, log_probs = reference(logits, uniform, size, *sampling)
    found, found_log_probs = sample(logits.clone(), uniform, size, *sampling)  # type: ignore[arg-type]
    clear = is_clear(logits, uniform, size, *(*sampling, -1, 1.0)[:3])  # type: ignore[arg-type]
    assert clear.float().mean() > 0.8
    assert torch.equal(found[clear], expected[clear])
    torch.testing.assert_close(found_log_probs[clear], log_probs[clear], rtol=0, atol=1e-5)
    assert (0 <= found).all() and (found < size).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_tokens_and_log_probs_are_those_of_the_reference(
    device: torch.device, dtype: torch.dtype, temperature: float
) -> None:
    """Over a chunk and a bit, of which the last ids are padding."""
    logits = (3 * torch.randn(ROWS, CHUNK + 300, device=device)).to(dtype)
    logits[:, -9:] = 100.0
    uniform = torch.rand(ROWS, dtype=torch.float64, device=device)
    assert_draws_as_the_reference(logits, uniform, CHUNK + 291, temperature)


@pytest.mark.parametrize(
    ("top_k", "top_p", "dtype"),
    [
        *((*filters, torch.float32) for filters in FILTERS),
        (200, 0.95, torch.bfloat16),
        (37, 1.0, torch.float16),
        (-1, 0.8, torch.float16),
    ],
)
def test_filters_keep_what_the_reference_keeps(
    device: torch.device, top_k: int, top_p: float, dtype: torch.dtype
) -> None:
    """Among many equal logits, 0 and -0 too, that lie on both sides of a chunk's end."""
    rows = ROWS // 5
    logits = ((3 * torch.randn(rows, CHUNK + 60, device=device)).round() / 2).to(dtype)
    uniform = torch.rand(rows, dtype=torch.float64, device=device)
    assert_draws_as_the_reference(logits, uniform, CHUNK + 57, 0.8, top_k, top_p)


def extreme_rows(width: int) -> Tensor:
    """(8, width) fp32."""
    rows = torch.randn(8, width)
    rows[0, width // 2] = 200.0  # has all the mass
    rows[1] = -3.0
    rows[2, ::2] = -torch.inf
    rows[3] = -torch.inf
    rows[3, -1] = -5.0  # the only one
    rows[4] = rows[4].clamp(-3, 3) * 1e38  # finite
    rows[5] = torch.where(rows[5] > 0, 3e38, -3e38)
    rows[6] = -0.0
    rows[7] = 3e38
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling", [(1.0, -1, 1.0), (1.5, -1, 1.0), (0.0, -1, 1.0), (1.0, 4, 1.0), (1.0, -1, 0.6), (2.0, 16, 0.6)]
)
def test_extreme_rows(device: torch.device, sampling: tuple[float, int, float]) -> None:
    rows = extreme_rows(32).to(device)
    numbers = (0.5 / 2**32, 1 / math.pi, 1 - 0.5 / 2**32)  # no quotient of small integers: row 5 has such boundaries
    for u in numbers if sampling[1:] == (-1, 1.0) or rows.is_cuda else random.choices(numbers):
        uniform = torch.full((len(rows),), u, dtype=torch.float64, device=device)
        expected, log_probs = reference(rows, uniform, 32, *sampling)
        found, found_log_probs = sample(rows.clone(), uniform, 32, *sampling)
        assert torch.equal(found, expected)
        torch.testing.assert_close(found_log_probs, log_probs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_vocabulary_of_one_and_a_batch_of_none(device: torch.device, temperature: float) -> None:
    half = torch.full((2,), 0.5, dtype=torch.float64, device=device)
    tokens, log_probs = sample(torch.tensor([[-7.0], [1e30]], device=device), half, 1, temperature)
    assert tokens.tolist() == [0, 0] and log_probs.tolist() == [0, 0]
    tokens, log_probs = sample(torch.zeros(0, 5, device=device), half[:0], 4, temperature, 2, 0.5)
    assert tokens.shape == log_probs.shape == (0,) and tokens.dtype == torch.int64


def test_of_equal_logits_the_lowest_id_is_likeliest(device: torch.device) -> None:
    logits = torch.zeros(3, CHUNK + 50, device=device)
    logits[1, [CHUNK - 1, CHUNK + 3]] = 1.0
    logits[2, [CHUNK + 40, CHUNK + 7]] = 1.0
    uniform = torch.full((3,), 0.9, dtype=torch.float64, device=device)
    for sampling in ((0.0, -1, 1.0), (1.0, 1, 1.0), (1.0, -1, 1e-9)):
        assert sample(logits, uniform, CHUNK + 50, *sampling)[0].tolist() == [0, CHUNK - 1, CHUNK + 7]


def test_a_boundary_belongs_to_the_token_behind_it(device: torch.device) -> None:
    logits = torch.zeros(3, 2 * CHUNK, device=device)
    uniform = torch.tensor([0.25, 0.5, 1 - 2**-13], dtype=torch.float64, device=device)
    assert sample(logits, uniform, 2 * CHUNK)[0].tolist() == [CHUNK // 2, CHUNK, 2 * CHUNK - 1]


def test_chunks_without_a_token(device: torch.device) -> None:
    logits = torch.zeros(2, 3 * CHUNK, device=device)
    logits[0, : 2 * CHUNK] = -torch.inf
    logits[1, CHUNK:] = -torch.inf
    uniform = torch.full((2,), 0.5, dtype=torch.float64, device=device)
    for sampling, inside in (((1.0, -1, 1.0), CHUNK // 2), ((1.0, 8, 1.0), 4), ((0.0, -1, 1.0), 0)):
        tokens, log_probs = sample(logits, uniform, 3 * CHUNK, *sampling)
        assert tokens.tolist() == [2 * CHUNK + inside, inside]
        torch.testing.assert_close(log_probs.exp().cpu(), torch.full((2,), 1 / CHUNK))


def test_of_those_at_the_bound_the_first_are_kept(device: torch.device) -> None:
    """Whichever zero they are, and however many of them follow in later chunks."""
    logits = torch.zeros(6, CHUNK + 30, device=device)
    logits[:, ::2] = -0.0
    logits[:, CHUNK + 20] = 1.0  # has e of 2 + e
    uniform = torch.tensor([0.2, 0.4, 0.45, 0.99, 0.1, 0.3], dtype=torch.float64, device=device)
    tokens, _ = sample(logits, uniform, CHUNK + 30, 1.0, 3)
    assert tokens.tolist() == [0, 1, CHUNK + 20, CHUNK + 20, 0, 1]


def test_a_token_does_not_depend_on_who_is_drawn_beside_it(device: torch.device) -> None:
    logits = torch.randn(3, CHUNK + 9, device=device)
    uniform = torch.rand(3, dtype=torch.float64, device=device)
    known = partials(logits, CHUNK + 9, 0.9)
    together = torch.stack(sample(logits, uniform, CHUNK + 9, 0.9, partials=known), 1)
    alone = [torch.stack(sample(logits[[i]], uniform[[i]], CHUNK + 9, 0.9), 1) for i in range(3)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_are_told(device: torch.device, wrong: float, temperature: float) -> None:
    """A whole row of -inf; of the others one is enough. Padding may be anything."""
    logits = torch.randn(3, 40, device=device)
    logits[:, 30:] = wrong
    uniform = np.array([0.1, 0.5, 0.9])
    for top_p in (1.0, 0.5):
        sampling = SamplingParams(1, temperature=temperature, top_p=top_p)
        checked_sample(logits.clone(), uniform, 30, sampling)
        broken = logits.clone()
        broken[1, slice(0, 40) if wrong < 0 else 7] = wrong
        with pytest.raises(FloatingPointError, match="not finite"):
            checked_sample(broken, uniform, 30, sampling)
