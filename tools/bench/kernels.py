"""The kernels beside their floor and their peers, on a CUDA GPU; or what their machine code takes, without one.

    python tools/bench kernels [NAME ...]
    python tools/bench kernels --rehearse [NAME ...]
    python tools/bench kernels --compile-only [NAME ...] [--chips sm_90 gfx942] [--in-turn]

NAME is a kernel of tools/kernel_cases, such as rms_norm. The first form measures the ceilings (a copy, a
reduction, which only reads, a matrix product) and then each case: median time, rate, the share of the floor, which is
the longer of the times that the bytes and the operations take at these ceilings, and the memory that was taken beside
inputs and results. The second runs each case once, on a CPU and on small inputs, and prints no figures. The third
compiles every kernel for five chips and prints registers, shared memory and spills; with --in-turn each variant of a
kernel with several of them for one of AMD's chips only.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch
import torch._functorch.config
import triton
from kernel_cases import MODULES, Case, cases_of
from kernel_cases.variants import CHIPS, KernelVariant, kernel_variants

from hpcrl.kernels.chips import Chip, chip
from hpcrl.runtime import platform

WARM_UP_MS, REPEAT_MS = 50, 300
WIDTHS = (40, 16, 8, 6, 7, 8, 9)
COLUMNS = ("case", "implementation", "ms", "GB/s", "TFLOP/s", "of floor", "extra MiB")
SMALL: dict[str, dict[str, Any]] = {  # sizes of a rehearsal
    "checksum": {"rows": 32, "cols": 48},
    "decode_attention": {"divisor": 64},
    "exact_attention": {"sequences": 2, "length": 40, "rows": 3, "context": 70},
    "exact_product": {"rows": (1, 40), "weights": ((48, 80),)},
    "expert_gradients": {"experts": 4, "rows": 40, "sizes": ((48, 32),)},
    "fp8_matrix": {"cols": 64, "outputs": 48, "rows": (4,)},
    "linear_log_prob": {"rows": 16, "hidden": 32, "vocabulary": 300, "chunk_rows": 8},
    "pack": {"layers": 2, "hidden": 64},
    "rms_norm": {"rows": 16, "width": 64},
    "rope": {"tokens": 32},
    "sampling": {"vocabulary": 512, "batches": (4,)},
    "store_heads": {"rows": 4, "blocks": 8},
    "swiglu": {"rows": 2, "widths": (96, 24)},
}


class Ceilings(NamedTuple):
    """bytes_per_second: of a copy, read and written. read_per_second: of what only reads."""

    bytes_per_second: float
    read_per_second: float
    flops_per_second: float

    def floor(self, case: Case) -> float:
        """Seconds."""
        bandwidth = self.read_per_second if case.only_reads else self.bytes_per_second
        return max(case.nbytes / bandwidth, case.flops / self.flops_per_second)


def measure(run: Callable[[], object]) -> float:
    """Median seconds."""
    return triton.testing.do_bench(run, warmup=WARM_UP_MS, rep=REPEAT_MS, return_mode="median") / 1e3


def ceilings() -> Ceilings:
    """Of a copy and a reduction of 4 GiB, and of a bf16 product of 8192 x 8192 random matrices."""
    x, y = torch.randint(2**60, (2, 2**29), device="cuda")
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    copy, read = 2 * x.nbytes / measure(lambda: y.copy_(x)), x.nbytes / measure(x.view(torch.float32).amax)
    return Ceilings(copy, read, 2 * 8192**3 / measure(lambda: a @ b))


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


def bench(names: list[str]) -> NoReturn:
    # Backward passes are measured again and again on the same graph.
    torch._functorch.config.donated_buffer = False
    top = ceilings()
    complete = show(names, lambda case, run: figures(case, run, top))
    copy, read = f"copy {top.bytes_per_second / 1e9:.0f} GB/s", f"reduction {top.read_per_second / 1e9:.0f} GB/s"
    products = f"bf16 products {top.flops_per_second / 1e12:.0f} TFLOP/s"
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    print(f"\n{torch.cuda.get_device_name()}, {versions}, {copy}, {read}, {products}")
    sys.exit(0 if complete else 1)


def rehearse(names: list[str]) -> NoReturn:
    """On the CPU: each case asks for CUDA, and torch.compile is left out."""
    torch.compile = lambda function=None, **_: function  # type: ignore[assignment]

    def once(case: Case, run: Callable[[], object]) -> str:
        run()
        return "ran once |"

    with platform.in_place_of_cuda(torch.device("cpu")), platform.cpu_bridge():
        complete = show(names, once, SMALL)
    print("\neach case ran once on the CPU")
    sys.exit(0 if complete else 1)


def show(
    names: list[str],
    row: Callable[[Case, Callable[[], object]], str],
    sizes: Mapping[str, dict[str, Any]] = MappingProxyType({}),
) -> bool:
    """Print a table, a row for each implementation of each case; whether all of them ran."""
    print(f"| {' | '.join(f'{title:<{width}}' for title, width in zip(COLUMNS, WIDTHS, strict=True))} |")
    print("|---|---|" + "---:|" * 5)
    complete = True
    for name in names:
        try:
            for case in cases_of(name, **sizes.get(name, {})):
                for who, run in case.runs.items():
                    try:
                        cells = row(case, run)
                    except Exception as error:  # the other figures are still wanted
                        cells, complete = f"{what(error)} |", False
                    print(f"| {case.name:<40} | {who:<16} | {cells}", flush=True)
        except Exception as error:  # where inputs are made
            print(f"| {name:<40} | {what(error)} |", flush=True)
            complete = False
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return complete


def figures(case: Case, run: Callable[[], object], top: Ceilings) -> str:
    """The columns behind the names."""
    seconds, extra = measure(run), extra_bytes(run)
    rates = f"{case.nbytes / seconds / 1e9:6.0f} | {case.flops / seconds / 1e12:7.1f}"
    return f"{seconds * 1e3:8.3f} | {rates} | {top.floor(case) / seconds:8.0%} | {extra / 2**20:9.0f} |"


def what(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def compile_only(names: list[str], chosen: list[Chip], *, in_turn: bool) -> None:
    print(f"triton {triton.__version__}; registers and spilled bytes of a thread, shared bytes of a program\n")
    print(f"{'kernel':<42}" + "".join(f"{f'{it.name} ({CHIPS[it.name]})':>26}" for it in chosen) + f"{'s':>8}")
    print(" " * 42 + f"{'reg  shared  spill':>26}" * len(chosen))
    wanted = [each for each in zip(*map(kernel_variants, chosen), strict=True) if each[0].name.split()[0] in names]
    seen, totals = Counter[str](), Counter(each[0].kernel.__name__ for each in wanted)
    for variants in wanted:
        kernel = variants[0].kernel.__name__
        left_out = others_turn(chosen, seen[kernel]) if in_turn and totals[kernel] > 1 else set()
        compile_variants(variants, [None if it in left_out else it for it in chosen])
        seen[kernel] += 1


def others_turn(chosen: list[Chip], number: int) -> set[Chip]:
    """Those of AMD's chips for which a kernel's variant of this number is not compiled: all but one of them."""
    of_amd = [it for it in chosen if it.vendor == "AMD"]
    return {it for at, it in enumerate(of_amd) if at != number % len(of_amd)}


def compile_variants(variants: tuple[KernelVariant, ...], chips: list[Chip | None]) -> None:
    """Compile each variant for its chip, and print the row. None: left out."""
    begin, columns = time.monotonic(), ""
    for variant, its_chip in zip(variants, chips, strict=True):
        is_compiled = its_chip is not None and variant.runs_on(its_chip)
        registers, shared, spilled = variant.compile(its_chip) if is_compiled else ("-",) * 3
        columns += f"{registers:>11}{shared:>8}{spilled:>7}"
    print(f"{variants[0].name:<42}{columns}{time.monotonic() - begin:8.1f}", flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--compile-only", action="store_true", help="needs no GPU")
    parser.add_argument("--rehearse", action="store_true", help="needs no GPU")
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS), help="to compile for")
    parser.add_argument("--in-turn", action="store_true", help="a variant for one of AMD's chips only")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(sorted(MODULES))}; all unless given")


def main(args: argparse.Namespace) -> int:
    known = sorted(MODULES)
    if unknown := set(args.names) - set(known):
        print(
            f"bench kernels: error: unknown {', '.join(sorted(unknown))}; expected some of {', '.join(known)}",
            file=sys.stderr,
        )
        return 2
    if args.compile_only:
        compile_only(args.names or known, [chip(name) for name in args.chips], in_turn=args.in_turn)
    elif args.rehearse:
        rehearse(args.names or known)
    elif torch.cuda.is_available():
        bench(args.names or known)
    else:
        print(
            "bench kernels: error: torch finds no CUDA GPU; use --rehearse or --compile-only without one",
            file=sys.stderr,
        )
        return 2
    return 0
