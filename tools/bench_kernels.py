"""The kernels beside their floor and their peers, on a CUDA GPU; or what their machine code takes, without one.

    python tools/bench_kernels.py [NAME ...]
    python tools/bench_kernels.py --compile-only [NAME ...] [--chips 90]

NAME is one of the files in tools/kernel_cases, such as rms_norm. The first form measures the ceilings (a copy, a matrix
product) and then each case: median time, rate, the share of the floor, which is the time that the bytes and operations
take at these ceilings, and the memory that was taken beside inputs and results. The second compiles every kernel for
three chips and prints registers, shared memory and spills.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch._functorch.config
import triton
from kernel_cases.case import Case

from hpcrl.kernels.specimen import CHIPS

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_MS, REPEAT_MS = 50, 300


class Ceilings(NamedTuple):
    bytes_per_second: float
    flops_per_second: float


def measure(run: Callable[[], object]) -> float:
    """Median seconds."""
    return triton.testing.do_bench(run, warmup=WARM_UP_MS, rep=REPEAT_MS, return_mode="median") / 1e3


def ceilings() -> Ceilings:
    """Of a copy of 4 GiB and of a bf16 product of 8192 x 8192 random matrices."""
    x, y = torch.randint(2**60, (2, 2**29), device="cuda")
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    return Ceilings(2 * x.nbytes / measure(lambda: y.copy_(x)), 2 * 8192**3 / measure(lambda: a @ b))


def extra_bytes(run: Callable[[], object]) -> int:
    """At most at once, beside what was there before and what the run gives."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    given = run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    results = given if isinstance(given, tuple | list) else (given,)
    return peak - sum(result.nbytes for result in results if isinstance(result, torch.Tensor))


def bench(names: list[str]) -> None:
    # Backward passes are measured again and again on the same graph.
    torch._functorch.config.donated_buffer = False
    top = ceilings()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"copy {top.bytes_per_second / 1e9:.0f} GB/s, bf16 products {top.flops_per_second / 1e12:.0f} TFLOP/s\n")
    print(f"{'case':<42}{'implementation':<18}{'ms':>9}{'GB/s':>8}{'TFLOP/s':>9}{'of floor':>10}{'extra MiB':>11}")
    for name in names:
        try:
            for case in importlib.import_module(f"kernel_cases.{name}").cases():
                for who, run in case.runs.items():
                    print(f"{case.name:<42}{who:<18}{figures(case, run, top)}", flush=True)
        except Exception as error:  # where inputs are made: the other figures are still wanted
            print(f"{name}: {what(error)}", flush=True)
        torch.cuda.empty_cache()


def figures(case: Case, run: Callable[[], object], top: Ceilings) -> str:
    """The columns behind the names, or what went wrong."""
    try:
        seconds, extra = measure(run), extra_bytes(run)
    except Exception as error:
        return what(error)
    floor = max(case.nbytes / top.bytes_per_second, case.flops / top.flops_per_second)
    rates = f"{case.nbytes / seconds / 1e9:8.0f}{case.flops / seconds / 1e12:9.1f}"
    return f"{seconds * 1e3:9.3f}{rates}{floor / seconds:10.0%}{extra / 2**20:11.0f}"


def what(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def compile_only(names: list[str], chosen: list[int]) -> None:
    print(f"triton {triton.__version__}; registers and spilled bytes of a thread, shared bytes of a program\n")
    chips = "".join(f"{f'sm_{chip} ({CHIPS[chip]})':>26}" for chip in chosen)
    print(f"{'kernel':<42}{chips}{'s':>8}")
    print(" " * 42 + f"{'reg  shared  spill':>26}" * len(chosen))
    for name in names:
        for specimen in importlib.import_module(f"hpcrl.kernels.{name}_triton").specimens():
            begin = time.monotonic()
            found = [specimen.compile(chip) for chip in chosen]
            columns = "".join(f"{each.registers:>11}{each.shared_bytes:>8}{each.spilled_bytes:>7}" for each in found)
            print(f"{specimen.name:<42}{columns}{time.monotonic() - begin:8.1f}", flush=True)


def main() -> int:
    known = sorted(path.stem.removesuffix("_triton") for path in (ROOT / "kernels").glob("*_triton.py"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile-only", action="store_true", help="needs no GPU")
    parser.add_argument("--chips", type=int, nargs="+", choices=CHIPS, default=list(CHIPS), help="to compile for")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; all unless given")
    args = parser.parse_args()
    unknown = set(args.names) - set(known)
    if unknown:
        parser.error(f"unknown {', '.join(sorted(unknown))}; expected some of {', '.join(known)}")
    if args.compile_only:
        compile_only(args.names or known, args.chips)
    elif torch.cuda.is_available():
        bench(args.names or known)
    else:
        print("bench_kernels: error: torch finds no CUDA GPU; use --compile-only without one", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
