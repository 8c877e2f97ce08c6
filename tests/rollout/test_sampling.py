"""Keyed sampling: known answers of the generator, a naive sampler beside the batched one, and its statistics."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.rollout.protocol import SamplingParams
from hpcrl.rollout.sampling import philox4x32, request_key, sample, uniforms

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_random123s_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    words = philox4x32(np.array([counter], dtype=np.uint32), np.array([key], dtype=np.uint32))
    assert tuple(words[0]) == expected


def test_the_key_is_bytes_that_another_program_can_make() -> None:
    digest = blake2b(bytes([7, 0, 0, 0, 0, 0, 0, 0]) + "prüf:3:0".encode(), digest_size=8).digest()
    expected = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
    assert tuple(request_key(7, "prüf:3:0")) == expected


def test_uniforms_depend_on_each_part_of_the_counter_and_on_nothing_else() -> None:
    keys = np.stack([request_key(0, "a"), request_key(0, "b"), request_key(1, "a")])
    grid = {
        (key, position, sample_index, step): uniforms(
            keys[[key]], np.array([position]), np.array([sample_index]), step
        )[0]
        for key in range(3)
        for position in range(3)
        for sample_index in range(3)
        for step in range(3)
    }
    assert len(set(grid.values())) == len(grid)
    together = uniforms(keys[[2, 0]], np.array([1, 2]), np.array([0, 2]), 1)
    assert tuple(together) == (grid[2, 1, 0, 1], grid[0, 2, 2, 1])
    assert all(0 < u < 1 for u in grid.values())


def naive_sample(logits: np.ndarray, u: float, sampling: SamplingParams) -> int:
    """One row in fp64, token by token."""
    scaled = logits.astype(np.float64) / sampling.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept = order if sampling.top_k == -1 else order[: sampling.top_k]
    mass = sum(probs[token] for token in kept)
    nucleus, reached = [], 0.0
    for token in kept:
        nucleus.append(token)
        reached += probs[token] / mass
        if reached >= sampling.top_p:
            break
    mass, reached = sum(probs[token] for token in nucleus), 0.0
    for token in sorted(nucleus):
        reached += probs[token] / mass
        if reached > u:
            return token
    raise AssertionError("u is 1 or more")


@given(
    seed=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 1, 3, 100]),
    top_p=st.sampled_from([0.1, 0.7, 0.95, 1.0]),
)
def test_sample_agrees_with_a_naive_sampler(seed: int, temperature: float, top_k: int, top_p: float) -> None:
    sampling = SamplingParams(1, temperature=temperature, top_k=top_k, top_p=top_p)
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(16, 24)).astype(np.float32)
    uniform = generator.uniform(size=16)
    found = sample(torch.from_numpy(logits), uniform, 20, sampling)
    expected = [naive_sample(row[:20], u, sampling) for row, u in zip(logits, uniform, strict=True)]
    assert found.token_ids.tolist() == expected
    unfiltered = torch.from_numpy(logits[:, :20] / temperature).log_softmax(-1)
    torch.testing.assert_close(found.log_probs, unfiltered[range(16), expected], rtol=0, atol=1e-6)


def test_frequencies_are_the_probabilities() -> None:
    probs = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    count = 40_000
    keys = np.broadcast_to(request_key(0, "file:0:0"), (count, 2))
    uniform = uniforms(keys, np.zeros(count), np.arange(count), step=3)
    drawn = sample(probs.log().expand(count, 5), uniform, 5, SamplingParams(1)).token_ids
    frequencies = torch.bincount(drawn, minlength=5) / count
    assert frequencies[1] == 0
    torch.testing.assert_close(frequencies, probs, rtol=0, atol=0.01)


def test_greedy_takes_the_lowest_of_equal_ids_with_its_log_prob_under_temperature_one() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 9.0], [2.0, 0.0, 1.0, 9.0]])
    found = sample(logits, np.array([0.9, 0.9]), 3, SamplingParams(1, temperature=0.0))
    assert found.token_ids.tolist() == [1, 0]
    torch.testing.assert_close(found.log_probs, logits[:, :3].log_softmax(-1)[[0, 1], [1, 0]])


@pytest.mark.parametrize("u", [1e-10, 0.5, 1 - 2**-33])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_rows_of_the_vocabulary_are_never_drawn(u: float, temperature: float) -> None:
    logits = torch.zeros(1, 64)
    logits[:, 25:] = 50.0
    found = sample(logits, np.array([u]), 25, SamplingParams(1, temperature=temperature))
    assert found.token_ids[0] < 25
    torch.testing.assert_close(found.log_probs[0], torch.tensor(1 / 25).log())


def test_of_equal_probabilities_top_k_keeps_the_lowest_ids() -> None:
    uniform = np.linspace(0.01, 0.99, 20)
    drawn = sample(torch.zeros(20, 8), uniform, 8, SamplingParams(1, top_k=2)).token_ids
    assert set(drawn.tolist()) == {0, 1}


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"max_new_tokens": 0}])
def test_impossible_sampling_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**({"max_new_tokens": 1} | wrong))  # type: ignore[arg-type]
