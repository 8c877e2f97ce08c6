"""JSON files that are replaced whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpcrl.sandbox import foreign_files
from hpcrl.sandbox.new_files import draft_of


def read_json(path: Path, absent: Any, root: Path | None = None) -> Any:
    """Contents of the file, which is inside `root`; `absent` if it is missing or damaged, or holds a value of another
    type."""
    try:
        found = foreign_files.read_json(path, root)
    except (OSError, ValueError):
        return absent
    return found if isinstance(found, type(absent)) else absent


def replace_json(path: Path, value: Any) -> None:
    """Write a file that is either the old one or the new one."""
    with draft_of(path) as draft:
        draft.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
