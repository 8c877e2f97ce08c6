"""The one exception of bad configuration."""

from __future__ import annotations


class ConfigError(ValueError):
    """A line for the user: what was found, what was expected, what to do. The program ends with exit code 2."""

    user_error = True
