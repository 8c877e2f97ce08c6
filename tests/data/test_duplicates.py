"""Planted duplicates are found, and no others; similarities are those of the definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.data import duplicates
from hpcrl.data.duplicates import find_duplicates, normalised, shingles, similar_pairs

WORDS = [f"word{number}" for number in range(3000)]


def prompts(count: int, seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, size=random.integers(12, 60))) for _ in range(count)]


@pytest.mark.parametrize("pairs_at_once", [1 << 23, 7])
def test_planted_duplicates_and_no_others(pairs_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "PAIRS_AT_ONCE", pairs_at_once)
    train, val = prompts(400, 1), prompts(100, 2)
    instruction = " Think first. Then answer the question in one word, please, without any more text than that."
    train[7] = val[3].upper().replace(" ", "\n ")
    train[8] = val[3]
    for row in (11, 12):
        words = val[row].split()
        words[len(words) // 2] = "another"
        train[row + 100] = " ".join(words)
    found = find_duplicates((text + instruction for text in train), (text + instruction for text in val))
    assert np.flatnonzero(found.train_exact).tolist() == [7, 8]
    assert np.flatnonzero(found.val_exact).tolist() == [3]
    assert np.flatnonzero(found.train_near).tolist() == [111, 112]
    assert np.flatnonzero(found.val_near).tolist() == [11, 12]
    assert [(one.train_row, one.val_row) for one in found.examples[:1]] == [(7, 3)]
    assert sorted((one.train_row, one.val_row) for one in found.examples[1:]) == [(111, 11), (112, 12)]
    assert all(0.5 <= one.similarity < 1 for one in found.examples[1:])


def test_instruction_in_the_middle_is_no_similarity() -> None:
    """An instruction that many prompts have, but not all, is common shingles."""
    instruction = " which you must solve with great care and in several steps and then check again "
    train, val = ([f"{text[:40]}{instruction}{text[-40:]}" for text in prompts(count, count)] for count in (40, 10))
    assert not find_duplicates([*train, "a b"], [*val, "c d"]).examples


def test_numbers_and_signs_are_words() -> None:
    assert normalised("What is  3+4 ?") == normalised("what is 3 + 4?") != normalised("What is 3 - 4?")
    assert normalised("ﬁrst Ｘ") == "first x" and normalised("二加三") == "二 加 三"
    found = find_duplicates(["What is 3 + 4?", "What is 3 - 4?"], ["what is 3+4?"])
    assert found.train_exact.tolist() == [True, False] and not found.train_near.any()


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=9), min_size=2, max_size=12), st.integers(1, 11))
def test_similarity_is_that_of_sets(texts: list[list[str]], num_left: int) -> None:
    owners, ids = shingles(texts)
    is_left = np.arange(len(texts)) < num_left
    left, right, similarity = similar_pairs(owners, ids, is_left, ~is_left, 0.25)
    padded = [text + [""] * (5 - len(text)) for text in texts]
    sets = [{tuple(text[start : start + 5]) for start in range(len(text) - 4)} for text in padded]
    common = {one for one in set().union(*sets) if sum(one in each for each in sets) > 10}
    sets = [each - common for each in sets]
    expected = {}
    for one in range(min(num_left, len(texts))):
        for other in range(num_left, len(texts)):
            shared = len(sets[one] & sets[other])
            if shared and shared / len(sets[one] | sets[other]) >= 0.25:
                expected[one, other] = shared / len(sets[one] | sets[other])
    assert dict(zip(zip(left.tolist(), right.tolist(), strict=True), similarity.tolist(), strict=True)) == expected


@pytest.mark.parametrize(("train", "val"), [([], []), (["a"], []), ([], ["a"]), ([""], ["", "a"])])
def test_empty_sets(train: list[str], val: list[str]) -> None:
    found = find_duplicates(train, val)
    assert found.train_exact.tolist() == [text in val for text in train] and not found.train_near.any()
