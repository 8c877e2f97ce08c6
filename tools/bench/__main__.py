"""Benchmarks: `python tools/bench NAME [options]`, under mpiexec where NAME says so; `python tools/bench NAME --help`.

NAME is a file of this folder with `add_options(parser)` and `main(options)`, which returns an exit code or None.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # tools/, whose files say `from bench.step import ...`
SHARED = ("__main__", "harness")


def main(arguments: list[str]) -> int | None:
    names = sorted({path.stem for path in Path(__file__).parent.glob("*.py")} - {*SHARED})
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("name", choices=names, metavar="NAME", help=", ".join(names))
    name = parser.parse_args(arguments[:1]).name
    module = import_module(f"bench.{name}")
    parser = argparse.ArgumentParser(
        prog=f"bench {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_options(parser)
    return module.main(parser.parse_args(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
