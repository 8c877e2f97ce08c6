"""Print the test files that a change touches: those that changed, and those that import a module that changed.

    tools/changed_tests.py        # against HPCRL_BASE, else origin/main, else the last commit; untracked files count

A test file imports a module when it names it, or names a helper below tests/ that does. What hpcrl's modules import of
each other is not followed: nearly all tests would be found. A page that changed has the tests of tests/docs.
"""

from __future__ import annotations

import ast
import os
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    changed = {ROOT / name for name in changed_files()}
    pages = any(path.suffix == ".md" for path in changed)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if changed.intersection({path, *imported(path)}) or (pages and path.parent.name == "docs"):
            print(path.relative_to(ROOT))


def changed_files() -> set[str]:
    has_main = bool(git("rev-parse", "--verify", "-q", "origin/main"))
    base = os.environ.get("HPCRL_BASE") or ("origin/main" if has_main else "HEAD")
    fork = git("merge-base", base, "HEAD") or base
    names = git("diff", "--name-only", fork) + "\n" + git("ls-files", "--others", "--exclude-standard")
    # kernels/ is imported through a link
    return {f"hpcrl/{name}" if name.startswith("kernels/") else name for name in names.split("\n")}


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def imported(path: Path) -> set[Path]:
    """Files that it names, with those that its helpers name; helpers may import each other."""
    found, left = set(named(path)), [path]
    seen = {path}
    while left:
        helpers = {file for file in named(left.pop()) if file.is_relative_to(ROOT / "tests")} - seen
        seen |= helpers
        left += helpers
        found.update(*map(named, helpers))
    return found


@cache
def named(path: Path) -> frozenset[Path]:
    """Files that it imports, and the conftest.py of its folder and of those above."""
    files: set[Path] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        files.update(file for name in names if (file := file_of(name)) is not None)
    folders = [folder for folder in path.parents if folder != ROOT and folder.is_relative_to(ROOT)]
    return frozenset(files.union(file for folder in folders if (file := folder / "conftest.py").exists()))


@cache
def file_of(name: str) -> Path | None:
    if name.split(".")[0] not in ("hpcrl", "tests"):
        return None
    base = ROOT.joinpath(*name.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


if __name__ == "__main__":
    main()
