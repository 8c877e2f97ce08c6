from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hpcrl.data.tokenizer import load_tokenizer

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The shipped character tokenizer."""
    return load_tokenizer(str(REPOSITORY / "configs" / "tokenizer"))


@pytest.fixture(scope="session")
def tool() -> Callable[[str], ModuleType]:
    """A script of tools/ as a module."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, REPOSITORY / "tools" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
