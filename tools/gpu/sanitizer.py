"""compute-sanitizer's memcheck over a small test of each kernel: `python -m tools.gpu.sanitizer PART PARTS`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

from tools.gpu.outcome import Failed, Skip, require

# One shape of each, with remainders where the kernel has blocks.
TESTS = (
    "test_decode_attention.py::test_it_is_attention[dtype1-shape1]",
    "test_decode_attention.py::test_rows_that_repeat_the_first",
    "test_linear_log_prob.py::test_triton_is_near_fp64[3-24-1000-777-3-dtype0]",
    "test_pack.py::test_rectangles_arrive_and_nothing_else_is_touched",
    "test_philox.py::test_numbers_are_those_of_the_host_bit_for_bit",
    "test_rms_norm.py::test_the_norm_of_a_sum_is_that_of_what_is_kept",
    "test_rms_norm.py::test_rows_that_lie_apart",
    "test_rope.py::test_heads_that_lie_apart",
    "test_sampling.py::test_extreme_rows",
    "test_swiglu.py::test_rows_that_lie_apart",
)


def main(part: int, parts: int) -> str:
    """The same tests without the sanitizer in a rehearsal.

    Args:
        part: number of the part, from 1 on.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *(f"tests/kernels/{name}" for name in TESTS[part - 1 :: parts]),
    ]
    environment = dict(os.environ)
    rehearsal = os.environ.get("HPCRL_GPU_REHEARSAL") == "1"
    if not rehearsal:
        sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
        if sanitizer is None:
            raise Skip("compute-sanitizer is not in the path")
        command = [sanitizer, "--tool", "memcheck", "--error-exitcode", "99", "--report-api-errors", "no", *command]
        # Each tensor by itself: what is read behind its end is not another's.
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    said = ended.stdout + ended.stderr
    print(said[-8000:], flush=True)
    passed = re.search(r"\d+ passed", said)
    require(ended.returncode == 0 and passed is not None, f"ended with code {ended.returncode}")
    assert passed is not None
    if rehearsal:
        return f"{passed[0]} in Triton's interpreter, without compute-sanitizer"
    summary = re.findall(r"ERROR SUMMARY: .*", said)
    require(bool(summary), "compute-sanitizer printed no summary")
    return f"{passed[0]}; {'; '.join(summary)}"


if __name__ == "__main__":
    try:
        print(f"pass: {main(*map(int, sys.argv[1:]))}")
    except Skip as skipped:
        print(f"skip: {skipped}")
        sys.exit(77)
    except Failed as failed:
        print(f"fail: {failed}")
        sys.exit(1)
