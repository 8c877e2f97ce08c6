"""Every kernel is compiled for GPUs that are not here, and its registers and shared memory hold what it needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REGISTERS = {"NVIDIA": 255, "AMD": 512}  # of a thread
SHARED = {"NVIDIA": 160 * 1024, "AMD": 64 * 1024}  # of a program: an A100's; LDS of an MI200 or MI300


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "sm_90 gfx90a gfx942 --in-turn",
        pytest.param("sm_80 sm_100 gfx90a gfx942", marks=pytest.mark.exhaustive),
    ],
)
def test_kernels_compile_and_spill_nothing(tmp_path: Path, options: str) -> None:
    """As `tools/bench_kernels.py --compile-only` says it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tools" / "bench_kernels.py"), "--compile-only", "--chips", *options.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    vendors = ["AMD" if chip.startswith("gfx") else "NVIDIA" for chip in options.split() if chip[0] != "-"]
    rows = re.findall(r"^(\w+) .*?" + r"\s+(\d+|-)" * 3 * len(vendors) + r"\s+[\d.]+$", done.stdout, re.MULTILINE)
    assert {row[0] for row in rows} == {path.stem for path in ROOT.glob("tools/kernel_cases/*.py")} - {
        "case",
        "variants",
    }
    for name, *cells in rows:
        for at, vendor in enumerate(vendors):
            numbers = [int(it) for it in cells[3 * at : 3 * at + 3] if it != "-"]
            if numbers:
                registers, shared, spilled = numbers
                assert registers <= REGISTERS[vendor] and shared <= SHARED[vendor] and not spilled, (name, cells)
