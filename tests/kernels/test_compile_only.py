"""Every kernel is compiled for GPUs that are not here, and its registers hold what it needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("chips", [("90",), pytest.param(("80", "100"), marks=pytest.mark.exhaustive)], ids="-".join)
def test_kernels_compile_and_spill_nothing(tmp_path: Path, chips: tuple[str, ...]) -> None:
    """As `tools/bench_kernels.py --compile-only` says it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tools" / "bench_kernels.py"), "--compile-only", "--chips", *chips]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(\w+) .*?" + r"\s+(\d+|-)" * 3 * len(chips) + r"\s+[\d.]+$", done.stdout, re.MULTILINE)
    assert {row[0] for row in rows} == {path.stem for path in ROOT.glob("tools/kernel_cases/*.py")} - {
        "case",
        "variants",
    }
    for name, *numbers in rows:
        registers, shared, spilled = ([int(it) for it in numbers[first::3] if it != "-"] for first in range(3))
        assert max(registers) <= 255 and max(shared) <= 160 * 1024 and not any(spilled), (name, numbers)
