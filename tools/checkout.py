"""Make this checkout importable where it is not installed: import it before `hpcrl`."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "hpcrl" / "kernels"

sys.path.insert(0, str(ROOT))
with suppress(FileExistsError):
    KERNELS.symlink_to("../kernels")  # as setup.py does
