"""Preferences, as UltraFeedback has them: prompt, chosen and rejected, as messages or text."""

from typing import Any

from hpcrl.data.source import (
    USUAL_FILES,
    Dropped,
    FileSource,
    Message,
    Row,
    answered_row,
    as_conversation,
    messages,
    split_answer,
    text,
    value,
)


def convert(row: Row) -> Row:
    sides = {name: side(value(row, name), name) for name in ("chosen", "rejected")}
    (before, chosen), (other, rejected) = sides.values()
    if before != other:
        raise Dropped("chosen and rejected answer different prompts")
    if chosen == rejected:
        raise Dropped("chosen and rejected are equal")
    return answered_row("preferences", before or prompt(row), chosen=chosen, rejected=rejected)


def side(found: Any, name: str) -> tuple[list[Message], str]:
    """The messages before an answer, none for an answer as text, and the answer."""
    if isinstance(found, str) and found.strip():
        return [], found
    if not found or isinstance(found, str):
        raise Dropped(f"no {name} answer")
    return split_answer(messages(found, name), name)


def prompt(row: Row) -> list[Message]:
    found = value(row, "prompt")
    return messages(found, "prompt") if isinstance(found, list) else as_conversation(text(row, "prompt"))


SOURCE = FileSource(
    files=(("train_prefs-*.parquet", "test_prefs-*.parquet"), *USUAL_FILES),
    convert=convert,
    template="{prompt}",
)
