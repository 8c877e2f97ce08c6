"""Prompts of one set that are in another one, too: exactly, or nearly."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from os.path import commonprefix
from typing import Any

import numpy as np

NUM_WORDS = 5  # words of a shingle
THRESHOLD = 0.5  # Jaccard similarity of near duplicates
COMMON_COUNT, COMMON_SHARE = 10, 0.01  # a shingle in more prompts than both is instruction text
PAIRS_AT_ONCE = 1 << 23  # bounds the memory
MAX_EXAMPLES = 5
# A sign is a word, so that 3 + 4 differs from 3 - 4; so is a character of a script without spaces.
IDEOGRAPHS = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
WORD = re.compile(rf"[{IDEOGRAPHS}]|[^\W{IDEOGRAPHS}]+|[^\w\s]")


@dataclass(frozen=True)
class Example:
    """A training row and a validation row with equal (similarity 1) or nearly equal prompts."""

    train_row: int
    val_row: int
    similarity: float


@dataclass(frozen=True)
class Duplicates:
    """Masks of the rows whose prompt has an equal one in the other set, or a near one and no equal one; bool (rows,).

    examples: the most similar pairs, exact ones first, at most MAX_EXAMPLES of each kind.
    """

    train_exact: np.ndarray
    train_near: np.ndarray
    val_exact: np.ndarray
    val_near: np.ndarray
    examples: tuple[Example, ...]

    @property
    def train(self) -> np.ndarray:
        """Training rows with an exact or near duplicate, bool (rows,)."""
        return self.train_exact | self.train_near

    def counts(self, split: str) -> dict[str, int]:
        """Rows of `train` or `val` with an exact duplicate, and with a near one."""
        return {kind: int(getattr(self, f"{split}_{kind}").sum()) for kind in ("exact", "near")}


def near_duplicates(threshold: float) -> dict[str, Any]:
    """What a near duplicate is, for dataset.json."""
    common = {"more_prompts_than": COMMON_COUNT, "larger_share_than": COMMON_SHARE}
    return {"words_per_shingle": NUM_WORDS, "jaccard_threshold": threshold, "common_shingles": common}


def prompt_text(prompt: Any) -> str:
    """A prompt as text: itself, or the contents of its messages, one after another."""
    if isinstance(prompt, list):
        return "\n".join(str(message.get("content")) for message in prompt if isinstance(message, dict))
    return str(prompt)


def picture_key(images: Any) -> str:
    """A hash of a row's pictures: of their bytes, or of their paths where the row has no bytes; "" without pictures."""
    hashed = hashlib.blake2b(digest_size=16)
    for image in images or ():
        content = (image.get("bytes") or image.get("path")) if isinstance(image, dict) else image
        encoded = content if isinstance(content, bytes) else str(content).encode()
        hashed.update(len(encoded).to_bytes(8, "big") + encoded)
    return hashed.hexdigest() if images else ""


def normalised(text: str) -> str:
    """The words of a text with single spaces, in lower case, in Unicode's normal form NFKC."""
    return " ".join(words(text))


def words(text: str) -> list[str]:
    return WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def find_duplicates(
    train: Iterable[str],
    val: Iterable[str],
    threshold: float = THRESHOLD,
    pictures: tuple[Sequence[str], Sequence[str]] | None = None,
) -> Duplicates:
    """Compare each training prompt with each validation prompt.

    Exact duplicates have equal `normalised` texts. Near duplicates have a Jaccard similarity of at least `threshold`
    between their sets of NUM_WORDS successive words. Instruction text does not count: words that all prompts begin or
    end with, and shingles that are in too many prompts (COMMON_COUNT, COMMON_SHARE). Similarities are exact, found with
    an inverted index.

    Args:
        pictures: `picture_key` of each training and validation prompt. Prompts with different pictures are no
            duplicates.
    """
    index: dict[tuple[str, str], int] = {}
    train_keys, val_keys = (repeat(""), repeat("")) if pictures is None else pictures
    train_of, val_of = distinct(train, train_keys, index), distinct(val, val_keys, index)
    texts = [text.split(" ") for text, _ in index]
    groups = np.unique([key for _, key in index], return_inverse=True)[1]
    in_train, in_val = (np.bincount(rows, minlength=len(texts)) > 0 for rows in (train_of, val_of))
    exact = in_train & in_val

    owners, ids = shingles(without_instruction(texts))
    val_texts, train_texts, similarity = similar_pairs(owners, ids, in_val, in_train, threshold)
    same = groups[val_texts] == groups[train_texts]
    val_texts, train_texts, similarity = val_texts[same], train_texts[same], similarity[same]
    near_train, near_val = (np.isin(np.arange(len(texts)), numbers) & ~exact for numbers in (train_texts, val_texts))

    first_train, first_val = (first_rows(rows, len(texts)) for rows in (train_of, val_of))
    pairs = [(text, text, 1.0) for text in np.flatnonzero(exact)[:MAX_EXAMPLES].tolist()]
    best = np.argsort(-similarity, kind="stable")[:MAX_EXAMPLES]
    pairs += zip(train_texts[best].tolist(), val_texts[best].tolist(), similarity[best].tolist(), strict=True)
    examples = (Example(int(first_train[ours]), int(first_val[other]), share) for ours, other, share in pairs)
    return Duplicates(exact[train_of], near_train[train_of], exact[val_of], near_val[val_of], tuple(examples))


def equal_problems(train: np.ndarray, val: np.ndarray) -> Duplicates:
    """Rows whose problem is in the other set, too, as exact duplicates.

    Args:
        train, val: a number per problem, (rows,).
    """
    train_exact, val_exact = np.isin(train, val), np.isin(val, train)
    rows = np.flatnonzero(train_exact)[:MAX_EXAMPLES].tolist()
    examples = (Example(row, int(np.flatnonzero(val == train[row])[0]), 1.0) for row in rows)
    return Duplicates(train_exact, np.zeros_like(train_exact), val_exact, np.zeros_like(val_exact), tuple(examples))


def distinct(texts: Iterable[str], pictures: Iterable[str], index: dict[tuple[str, str], int]) -> np.ndarray:
    """Add normalised texts with their pictures to `index`, each with its number, and return the number of each text,
    int64 (texts,)."""
    seen: dict[tuple[str, str], int] = {}
    numbers = []
    for prompt in zip(texts, pictures, strict=False):
        if prompt not in seen:
            text, key = prompt
            seen[prompt] = index.setdefault((normalised(text), key), len(index))
        numbers.append(seen[prompt])
    return np.array(numbers, dtype=np.int64)


def first_rows(numbers: np.ndarray, count: int) -> np.ndarray:
    """The first row with each number, int64 (count,); 0 where there is none."""
    first = np.zeros(count, dtype=np.int64)
    first[numbers[::-1]] = np.arange(len(numbers))[::-1]
    return first


def without_instruction(texts: Sequence[list[str]]) -> list[list[str]]:
    """Texts as lists of words, without the words that all of them begin with, and those that all end with."""
    if len(texts) < 2:
        return list(texts)
    start = len(commonprefix(texts))
    # of the words after the start, from the last one on
    end = len(commonprefix([text[: start - len(text) - 1 : -1] for text in texts]))
    return [text[start : len(text) - end] for text in texts]


def shingles(texts: Sequence[list[str]]) -> tuple[np.ndarray, np.ndarray]:
    """The set of shingles of each text: numbers of texts, ascending, and of shingles, both int64 (shingles,).

    A text of fewer than NUM_WORDS words is one shingle. Shingles in too many texts are left out.
    """
    vocabulary: dict[str, int] = {}
    flat, sizes = list[int](), list[int]()
    for text in texts:
        flat += [vocabulary.setdefault(word, len(vocabulary) + 1) for word in text]
        padding = max(NUM_WORDS - len(text), 0)
        flat += [0] * padding
        sizes.append(len(text) + padding)
    random = np.random.default_rng(0).integers(1, 1 << 63, size=len(vocabulary) + 1 + NUM_WORDS, dtype=np.uint64)
    # A shingle's hash is a sum of random 64-bit numbers of its words times odd numbers of their places, modulo 2^64.
    values = random[NUM_WORDS:][np.array(flat, dtype=np.int64)]
    windows = max(len(flat) - NUM_WORDS + 1, 0)
    hashes = np.zeros(windows, dtype=np.uint64)
    for place in range(NUM_WORDS):
        hashes += values[place : place + windows] * (random[place] | np.uint64(1))
    lengths = np.array(sizes, dtype=np.int64)
    owners = np.repeat(np.arange(len(texts)), lengths)[:windows]
    ends = np.cumsum(lengths)
    inside = np.arange(windows) + NUM_WORDS <= ends[owners]
    _, ids = np.unique(hashes[inside], return_inverse=True)
    count = int(ids.max(initial=-1)) + 1
    pairs = np.unique(owners[inside] * count + ids)
    owners, ids = pairs // max(count, 1), pairs % max(count, 1)
    rare = np.bincount(ids, minlength=count) <= max(COMMON_COUNT, COMMON_SHARE * len(texts))
    return owners[rare[ids]], ids[rare[ids]]


def similar_pairs(
    owners: np.ndarray, ids: np.ndarray, is_left: np.ndarray, is_right: np.ndarray, threshold: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs of a left and another, right text whose sets of shingles have at least this Jaccard similarity.

    Returns left and right texts, int64, and similarities.

    Args:
        owners, ids: as `shingles` returns them.
        is_left, is_right: bool (texts,).
    """
    num_texts = len(is_left)
    sizes = np.bincount(owners, minlength=num_texts)
    on_right = is_right[owners]
    order = np.argsort(ids[on_right], kind="stable")
    posting_ids, posting_texts = ids[on_right][order], owners[on_right][order]
    left_texts, left_ids = owners[is_left[owners]], ids[is_left[owners]]
    starts, ends = (np.searchsorted(posting_ids, left_ids, side=side) for side in ("left", "right"))
    blocks = []
    for part in parts(left_texts, ends - starts):
        counts = ends[part] - starts[part]
        shift = np.repeat(starts[part] - np.cumsum(counts) + counts, counts)
        rights = posting_texts[np.arange(len(shift)) + shift]
        pairs, shared = np.unique(np.repeat(left_texts[part], counts) * num_texts + rights, return_counts=True)
        left, right = pairs // num_texts, pairs % num_texts
        similarity = shared / (sizes[left] + sizes[right] - shared)
        near = (similarity >= threshold) & (left != right)
        blocks.append((left[near], right[near], similarity[near]))
    left, right, similarity = (np.concatenate(column) for column in zip(*blocks, strict=True))
    return left, right, similarity


def parts(texts: np.ndarray, counts: np.ndarray) -> list[slice]:
    """Slices of entries, all of a text in one slice, with at most PAIRS_AT_ONCE pairs and those of one text more."""
    pairs_so_far = np.cumsum(np.bincount(texts, weights=counts))
    part_of = (pairs_so_far // PAIRS_AT_ONCE)[texts]
    edges = [0, *(np.flatnonzero(np.diff(part_of)) + 1).tolist(), len(texts)]
    return [slice(start, stop) for start, stop in pairwise(edges)]
