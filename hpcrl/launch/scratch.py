"""Folders that other people's code wrote in."""

from __future__ import annotations

import os
import shutil


def remove(folder: str) -> None:
    """Removes a folder, also one whose owner may not look into it; what cannot be removed stays."""
    for path, folders, _ in os.walk(folder):  # each before it is looked into
        for name in folders:
            inside = os.path.join(path, name)
            if not os.path.islink(inside):
                try:
                    os.chmod(inside, 0o700)
                except OSError:
                    pass
    shutil.rmtree(folder, ignore_errors=True)
