"""Every kernel is compiled for GPUs that are not here, and its registers and shared memory hold what it needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.kernel_cases import MODULES

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "most_registers", "most_shared"),
    [
        ("sm_90", 255, 160 * 1024),  # shared memory of an A100
        ("gfx90a gfx942 --in-turn", 512, 64 * 1024),
        pytest.param("sm_80 sm_100", 255, 160 * 1024, marks=pytest.mark.exhaustive),
        pytest.param("gfx90a gfx942", 512, 64 * 1024, marks=pytest.mark.exhaustive),
    ],
)
def test_kernels_compile_and_spill_nothing(tmp_path: Path, options: str, most_registers: int, most_shared: int) -> None:
    """As `tools/bench kernels --compile-only` says it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tools" / "bench"), "kernels", "--compile-only", "--chips", *options.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    num_chips = len(re.findall(r"\b(?:sm|gfx)", options))
    rows = re.findall(r"^(\w+) .*?" + r"\s+(\d+|-)" * 3 * num_chips + r"\s+[\d.]+$", done.stdout, re.MULTILINE)
    assert {row[0] for row in rows} == MODULES.keys()
    compiled = [(name, [int(it) for it in numbers if it != "-"]) for name, *numbers in rows]
    for name, numbers in compiled:
        if numbers:  # chips without 8-bit products leave some out
            registers, shared, spilled = (numbers[first::3] for first in range(3))
            assert max(registers) <= most_registers and max(shared) <= most_shared and not any(spilled), (name, numbers)
