"""Calls of the kernel that Python has no name for."""

from __future__ import annotations

import ctypes
import os


def call(function: str, *arguments: object) -> None:
    """A function of the C library that returns 0; OSError, which names it, where it does not."""
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")
