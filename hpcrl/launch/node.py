"""The name of this node."""

from __future__ import annotations

import os
import platform


def node_name() -> str:
    """As Slurm calls it, so that a person can exclude it; else the host's name."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()
