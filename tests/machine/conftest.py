"""Jobs that are started as a person would start them."""

from tests.runtime.conftest import run, start  # noqa: F401  # fixtures
