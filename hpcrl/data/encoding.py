"""Texts as tokens, and the one line for a text that a tokenizer cannot encode whole."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hpcrl.data.tokenizer import end_token_ids
from hpcrl.runtime.exits import InputError, folded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SURROGATE = re.compile("[\ud800-\udfff]")


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], places: list[str], add_special_tokens: bool
) -> list[list[int]]:
    """Return token ids of each text. Raises InputError, with the text's place, for text that has no tokens."""
    if not texts:
        return []
    try:
        ids = tokenizer(texts, add_special_tokens=add_special_tokens, return_attention_mask=False)["input_ids"]
    except Exception:  # of one of the texts; the loop finds it
        for text, where in zip(texts, places, strict=True):
            with encodable(tokenizer, text, where):
                tokenizer(text, add_special_tokens=add_special_tokens)
        raise
    for text, where in zip(texts, places, strict=True):
        check_characters(tokenizer, text, where)
    return ids


@contextmanager
def encodable(tokenizer: PreTrainedTokenizerBase, text: str, where: str) -> Iterator[None]:
    """Raise InputError for a text that the tokenizer, which encodes it inside, fails for or drops characters of."""
    check_characters(tokenizer, text, where)
    try:
        yield
    except Exception as error:  # the tokenizers library raises bare Exception
        raise InputError(
            f"{where}: the tokenizer cannot encode {text[:80]!r}: {folded(error)}; "
            "expected text in its vocabulary; use another model.tokenizer"
        ) from None


def check_characters(tokenizer: PreTrainedTokenizerBase, text: str, where: str) -> None:
    """Raise InputError for half of a surrogate pair, and for a character that the tokenizer would drop."""
    if not text.isascii() and (half := SURROGATE.search(text)):
        before = text[max(half.start() - 20, 0) : half.start()]
        raise InputError(
            f"{where}: found half of a surrogate pair, {half[0]!r}, after {before!r}; expected Unicode text; "
            "remove it, or the row"
        )
    if dropped := [character for character in sorted(set(text)) if _is_dropped(tokenizer, character)]:
        rest = _added_tokens(tokenizer).sub("", text)  # their characters need no token of their own
        for character in dropped:
            if character in rest:
                raise InputError(
                    f"{where}: the tokenizer has no token for {character!r} in {text[:80]!r}; "
                    "expected text in its vocabulary; use another model.tokenizer"
                )


@functools.lru_cache(16)
def _added_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Matches the text of the tokens that are found before the model of the tokenizer runs, such as special ones."""
    return re.compile("|".join(map(re.escape, tokenizer.get_added_vocab())) or "(?!)")


@functools.lru_cache(2**16)
def _is_dropped(tokenizer: PreTrainedTokenizerBase, character: str) -> bool:
    """Whether the tokens of a character stand for less than its text: BPE drops what it has no token for."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "BPE":
        return False
    if backend.model.unk_token is not None or backend.model.byte_fallback:
        return False
    text = backend.normalizer.normalize_str(character) if backend.normalizer else character
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)] if backend.pre_tokenizer else [text]
    tokens = backend.encode(character, add_special_tokens=False).tokens
    return sum(map(len, tokens)) < sum(map(len, pieces))


def split_end(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[str, str]:
    """The text before the end-of-sequence tokens at its end, and the first of them, or ""; white space may follow."""
    found = _ends_at_the_end(tokenizer).search(text)
    return (text[: found.start()], found[1]) if found else (text, "")


@functools.lru_cache(16)
def _ends_at_the_end(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    ends = "|".join(re.escape(end) for token in end_token_ids(tokenizer) if (end := str(tokenizer.decode([token]))))
    return re.compile(rf"({ends or '(?!)'})(?:\s|{ends or '(?!)'})*\Z")
