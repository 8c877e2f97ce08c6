"""Run verl or TRL itself on the cases of a family and keep its numbers beside them, for the tests to compare with.

    python tools/record_cases.py tests/algorithms/verl_cases/advantages.py ...

A family is a Python file with `CASES`, name -> inputs, and `reference(name, inputs)`, which imports the package and
returns name -> array (written to <family>.npz as `<case>/<output>`), or plain JSON values where `FORMAT = "json"`. It
needs an environment that has verl 0.9.1 or TRL 1.16.0 besides torch; nothing else does.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import numpy as np


def record(family: Path) -> Path:
    module = runpy.run_path(str(family))
    found = {name: module["reference"](name, inputs) for name, inputs in module["CASES"].items()}
    if module.get("FORMAT") == "json":
        path = family.with_suffix(".json")
        path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return path
    path = family.with_suffix(".npz")
    np.savez_compressed(path, **{f"{case}/{name}": array for case, out in found.items() for name, array in out.items()})
    return path


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(
            "usage: python tools/record_cases.py FAMILY.py ...; families are in tests/*/verl_cases/ and trl_cases/"
        )
    for argument in sys.argv[1:]:
        path = record(Path(argument))
        print(f"{path}: {path.stat().st_size} bytes")
