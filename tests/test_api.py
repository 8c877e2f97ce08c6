"""hpcrl.api: every name is there, the page on writing your own lists them all, and parameters need no torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl import api

ROOT = Path(__file__).parents[1]


def test_names_are_those_of_the_page() -> None:
    assert dir(api) == api.__all__ and all(hasattr(api, name) for name in api.__all__)
    page = (ROOT / "docs" / "extending" / "index.md").read_text(encoding="utf-8")
    table = page[page.index("| name of `hpcrl.api`") :]
    assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, flags=re.M)))) == set(api.__all__)


def test_an_unknown_name_is_one_line() -> None:
    with pytest.raises(AttributeError, match="hpcrl.api has no 'Trian'; it has ActorWorker"):
        _ = api.Trian  # type: ignore[attr-defined]


def test_declarations_need_no_torch() -> None:
    names = "TrainingJob, Train, Section, Field, RoleSpec, register, Dispatch, DataProto, param"
    code = f"from hpcrl.api import {names}\nimport sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not {"torch", "megatron", "mpi4py"}.intersection(loaded.split())
