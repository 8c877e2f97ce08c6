from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.data.tokenizer import load_tokenizer

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The shipped tokenizer with the words of tool calls."""
    return load_tokenizer(str(REPOSITORY / "configs" / "tool_tokenizer"))
