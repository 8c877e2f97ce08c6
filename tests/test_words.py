"""Names, comments, docstrings, messages and pages use the field's terms; programs are not described as persons.

The list has the words that crept in most often. A line that needs one of them is matched by ALLOWED.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INSTEAD = {  # pattern, as a word or a part of a name -> what to write
    "nobody|somebody|whoever": "no rank, a rank, the rank that",
    "lest": "so that ... not",
    "knows?|knew": "has, reads, computes",
    "tells?|told": "sends, reports, says in a message",
    "hears?|heard": "receives",
    "obeys?|obeyed": "follows, runs",
    "speaks?|spoken?": "prints, sends",
    "refuses?|refused|refusal": "raises, rejects, is an error",
    "wants": "needs, expects",
    "attends": "waits for, polls",
    "patience": "timeout",
    "whereabouts": "status",
    "delivery|deliveries": "transfer",
    "chief": "leader",
    "desk": "context",
    "farewell": "shutdown",
    "withdraws?|withdrawn": "cancel",
    "lends?|lent": "share, alias",
    "mends?|mended": "fix",
    "goes? on|going on|went on": "continues",
    "gets on": "makes progress",
    "of that(?=[,;.]|$)": "name the noun",
    "alone": "only",
    "(its|their|your) like": "its peers",
    "costs the": "name what is lost",
    "leaves? alone": "does not change",
}
ALLOWED = (
    r"attends to",  # a query attends to keys
    r"(def |\.)tell\(",  # of Python's files
    r"pip seeing PyPI alone",
)
# they say only that something was computed
VAGUE = frozenset({"found", "made", "some", "kept", "left", "wanted"})
VAGUE_FROM = 13  # lines of a function; in shorter ones the whole is in view
PAIRS = frozenset({"left", "right"})  # of sides
FOLDERS = ("hpcrl", "kernels", "docs", "configs", "slurm", "README.md")


def files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.splitlines()]
    return [path for path in paths if path.suffix in (".py", ".md", ".yaml", ".sh", ".sbatch") and path.is_file()]


@pytest.mark.parametrize("pattern", INSTEAD)
def test_words(pattern: str) -> None:
    word = re.compile(rf"(?<![A-Za-z])({pattern})(?![A-Za-z])", re.IGNORECASE)
    allowed = re.compile("|".join(ALLOWED), re.IGNORECASE)
    found = []
    for path in files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if word.search(allowed.sub("", line)):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, f"write {INSTEAD[pattern]!r} in\n" + "\n".join(found)


def vague_locals(path: Path) -> Iterator[str]:
    """Locals and arguments of long functions whose names are in VAGUE; `left` is a side beside `right`."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(function, functions) or function.end_lineno - function.lineno + 1 < VAGUE_FROM:  # type: ignore[operator]
            continue
        names = {node.arg: node.lineno for node in ast.walk(function) if isinstance(node, ast.arg)}
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.setdefault(node.id, node.lineno)
        for name in VAGUE & names.keys():
            if not (name in PAIRS and PAIRS <= names.keys()):
                yield f"{path.relative_to(ROOT)}:{names[name]}: {function.name}: {name}"


def test_locals_of_long_functions_are_nouns() -> None:
    tracked = subprocess.run(["git", "ls-files", "hpcrl", "kernels", "tools"], cwd=ROOT, capture_output=True, text=True)
    paths = [ROOT / name for name in tracked.stdout.splitlines() if name.endswith(".py")]
    vague = [line for path in paths if path.is_file() for line in vague_locals(path)]
    assert not vague, "name each for what it is:\n" + "\n".join(vague)
