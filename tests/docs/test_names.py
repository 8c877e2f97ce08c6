"""Modules, their attributes and files that pages, docstrings and comments name exist."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, expand

FOLDERS = ("hpcrl", "kernels", "slurm", "configs", "tests", "tools", "docs")
INSIDE = "|".join(path.name for path in (ROOT / "hpcrl").iterdir() if path.is_dir() and not path.is_symlink())
PATH = re.compile(rf"(?<![\w/.~-])(?:{'|'.join(FOLDERS)}|\.ci)/(?:[\w./*,-]|\{{[\w./*,-]*\}})*")
SHORT = re.compile(rf"(?<![\w/.~-])(?:{INSIDE})/[\w/]+\.py\b")  # below hpcrl/
MODULE = re.compile(r"(?<![\w/.-])hpcrl(?:\.[A-Za-z_]\w*)+")


def dotted_names(text: str) -> Iterator[str]:
    yield from MODULE.findall(text)


def paths(text: str) -> Iterator[str]:
    """Paths of this repository: `configs/*_cpu.yaml`, `tests/{model,engine}`; upper-case words stand for any name."""
    yield from (f"hpcrl/{path}" for path in SHORT.findall(text))
    for found in PATH.findall(text):
        for path in expand(found):
            yield re.sub(r"\b[A-Z]{2,}(?=_|/|\b)(?!\.md)", "*", path).rstrip(".,-")


def is_file(path: str) -> bool:
    return any(ROOT.glob(path.rstrip("/"))) if "*" in path else (ROOT / path).exists()


def is_defined(name: str) -> bool:
    """Whether a dotted name is a folder, a module, or what a module or a class of one defines or imports."""
    path, parts = ROOT, name.split(".")
    if parts[:2] == ["hpcrl", "kernels"]:
        parts = parts[1:]
    while parts and (path / parts[0]).is_dir():
        path /= parts.pop(0)
    if not parts:
        return True
    if (path / f"{parts[0]}.py").is_file():
        path /= f"{parts.pop(0)}.py"
    else:
        path /= "__init__.py"
    return not parts or (path.is_file() and is_bound(parts, contents(path)))


@pytest.mark.parametrize(("named", "exists"), [(dotted_names, is_defined), (paths, is_file)])
def test_what_is_named_exists(named: Callable[[str], Iterator[str]], exists: Callable[[str], bool]) -> None:
    missing = []
    for file in sources():
        text = file.read_text(encoding="utf-8")
        absent = {name for name in named(text) if not exists(name)}
        if absent and file.suffix == ".py":
            absent.intersection_update(named(prose(text)))
        missing += [f"{file.relative_to(ROOT)}: {name}" for name in sorted(absent)]
    assert not missing, "\n".join(missing)


def test_each_tool_has_its_line() -> None:
    """What for, and how to run it, in tools/README.md."""
    folder = ROOT / "tools"
    tools = {path.name for path in folder.iterdir() if path.suffix in (".py", ".sh") or any(path.glob("*.*"))}
    lines = re.findall(
        r"^\| `([\w.]+)` \| .+ \| .+ \|$", (folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(lines) == sorted(tools - {"__pycache__"})


def sources() -> Iterator[Path]:
    yield ROOT / "README.md"
    for folder in FOLDERS:
        kinds = (".md", ".py", ".sh", ".sbatch", ".yaml", ".svg")
        yield from (path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in kinds)


def prose(source: str) -> str:
    """Docstrings and comments. Strings that a program uses may have names of other things."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    docstrings = [text for node in nodes if (text := ast.get_docstring(node)) is not None]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return "\n".join([*docstrings, *(token.string for token in tokens if token.type == tokenize.COMMENT)])


@cache
def contents(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text(encoding="utf-8")).body


def is_bound(parts: list[str], body: list[ast.stmt]) -> bool:
    """Whether the statements bind the first part, and the class that it names has the rest. A class with bases may have
    any attribute."""
    first, *rest = parts
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == first:
            return not rest or bool(node.bases) or is_bound(rest, node.body) or rest[0] in set_on_self(node)
        if first in names_of(node):
            return True
        if isinstance(node, (ast.If, ast.Try)) and is_bound(parts, [*node.body, *node.orelse]):
            return True
    return False


def names_of(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def set_on_self(node: ast.ClassDef) -> set[str]:
    attributes = (inner for inner in ast.walk(node) if isinstance(inner, ast.Attribute))
    return {inner.attr for inner in attributes if isinstance(inner.ctx, ast.Store)}


def test_planted_faults_are_still_in_place() -> None:
    """Each fault's text is once in its file, and its test exists."""
    command = [sys.executable, "tools/planted_faults.py", "--list"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
