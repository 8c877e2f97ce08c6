"""The algorithms stand alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import hpcrl.algorithms


def test_torch_and_numpy_are_enough():
    """In a fresh interpreter where every other third-party package and the rest of hpcrl are out of reach."""
    folder = Path(hpcrl.algorithms.__path__[0])
    paths = [path.relative_to(folder).with_suffix("") for path in folder.rglob("[a-z]*.py")]
    names = [".".join(("hpcrl", "algorithms", *path.parts)) for path in paths]
    program = f"""
import importlib, sys, torch, numpy
before = set(sys.modules)
for name in {names!r}:
    importlib.import_module(name)
new = {{name.split(".")[0] for name in set(sys.modules) - before}} - set(sys.stdlib_module_names)
assert new <= {{"hpcrl", "torch", "numpy"}}, new
inside = {{name for name in sys.modules if name.startswith("hpcrl.")}} - {{"hpcrl.moved"}}
assert all(name.startswith("hpcrl.algorithms") for name in inside), inside
"""
    assert len(names) >= 9
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, cwd=folder.parents[1])
