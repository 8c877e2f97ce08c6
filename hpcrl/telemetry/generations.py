"""Generations for people to read: JSON lines, and a Markdown table for TensorBoard."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def write_generations(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One JSON object per row, all with the same keys: null where a row lacks one, or has a number JSON cannot hold.

    The file is whole or not there; one of an earlier attempt is replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json_line({key: row.get(key) for key in keys}))
    os.replace(temporary, path)


def json_line(row: Mapping[str, Any]) -> str:
    """A JSON object and its line break: null for a number that JSON cannot hold, text for what it does not know."""
    return json.dumps(_finite(row), ensure_ascii=False, allow_nan=False, default=str) + "\n"


def generations_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Markdown of the rows' `input`, `output` and `score`."""
    lines = ["| prompt | response | score |", "|---|---|---|"]
    lines += [f"| {_code(row['input'])} | {_code(row['output'])} | {row['score']:.3g} |" for row in rows]
    return "\n".join(lines)


def _code(text: str) -> str:
    return "`" + text.replace("`", "'").replace("|", "\\|").replace("\n", " ") + "`"


def _finite(value: Any) -> Any:
    """The value with null for numbers that JSON does not know, inside of lists and mappings too."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
