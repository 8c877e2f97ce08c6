"""The tables of a test run: seconds and CPU seconds of each part, the slowest tests, and files above their budget.

    tools/test_report.py FOLDER [--seconds N] [--write-budgets]

FOLDER has a folder for each part with what tests/costs.py writes, and `parts.jsonl` of `tools/test.sh`: [part, seconds,
exit code, pytest's last line]. Budgets are CPU seconds of a test file over all parts and ranks (tests/budgets.yaml); a
file without one has LEAST. A file that takes more than FACTOR times its budget and COLD seconds fails the run, as a
part that failed does. On a machine that is slower in the median of the files, budgets grow with it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import yaml

BUDGETS = Path(__file__).parents[1] / "tests" / "budgets.yaml"
FACTOR = 3.0
LEAST = 5.0  # CPU seconds
COLD = 60.0  # that imports and compilation may take the file that is first to need them
HEADER = """\
# CPU seconds of a test file over all parts and ranks; tools/test_report.py enforces 3 x.
# tools/test.sh --all --write-budgets measures them anew.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=0.0, help="of the whole run, in which parts overlap")
    parser.add_argument("--write-budgets", action="store_true", help="the measured CPU seconds become the budgets")
    arguments = parser.parse_args()
    parts = [json.loads(line) for line in (arguments.folder / "parts.jsonl").read_text().splitlines()]
    failed = [name for name, _, code, _ in parts if code != 0]
    by_file: dict[str, float] = defaultdict(float)
    total = 0.0
    by_test: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    print(f"\n{'part':<14} {'seconds':>8} {'CPU s':>8}   result")
    for name, seconds, code, closing in parts:
        spent = 0.0
        for path in (arguments.folder / name).glob("*.jsonl"):
            for test, wall, cpu in map(json.loads, path.read_text().splitlines()):
                spent += cpu
                if test:
                    by_file[test.partition("::")[0]] += cpu
                    cost = by_test[name, test]
                    cost[:] = max(cost[0], wall), cost[1] + cpu
        total += spent
        result = closing if code == 0 else f"FAILED (exit code {code}) {closing}"
        print(f"{name:<14} {seconds:>8.0f} {spent:>8.0f}   {result}")
    print(f"{'all':<14} {arguments.seconds:>8.0f} {total:>8.0f}\n\nslowest tests: seconds, CPU seconds")
    for (name, test), (wall, cpu) in sorted(by_test.items(), key=lambda each: -each[1][0])[:10]:
        print(f"{wall:>8.1f} {cpu:>8.1f}   {name}: {test}")
    if arguments.write_budgets:
        budgets = {file: max(1, round(cpu)) for file, cpu in sorted(by_file.items()) if cpu > LEAST / 2}
        BUDGETS.write_text(HEADER + yaml.safe_dump(budgets))
        return 1 if failed else 0
    over = above_budget(by_file, yaml.safe_load(BUDGETS.read_text()) or {})
    for file, limit in over.items():
        print(
            f"test_report.py: error: {file} took {by_file[file]:.0f} CPU s, more than the {limit:.0f} that its budget "
            "allows; make it cheaper, or change tests/budgets.yaml with a reason",
            file=sys.stderr,
        )
    return 1 if over or failed else 0


def above_budget(by_file: Mapping[str, float], budgets: Mapping[str, float]) -> dict[str, float]:
    """The files that took more CPU seconds than their limit, with it."""
    ratios = [cpu / budgets[file] for file, cpu in by_file.items() if file in budgets]
    slower = max(1.0, median(ratios)) if ratios else 1.0
    limits = {file: FACTOR * slower * budgets.get(file, LEAST) + COLD for file in by_file}
    return {file: limit for file, limit in limits.items() if by_file[file] > limit}


if __name__ == "__main__":
    sys.exit(main())
