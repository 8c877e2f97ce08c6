"""The tables of a test run: seconds and CPU seconds of each part, the slowest tests, and files above their budget.

    tools/test_report.py FOLDER [--seconds N] [--write-budgets]

FOLDER has a folder for each part with what tests/costs.py writes, and `parts.jsonl` of `tools/test.sh`: [part, seconds,
exit code, pytest's last line]. Budgets are CPU seconds of a test file over all parts and ranks (tests/budgets.yaml). A
file that takes more than FACTOR times its budget fails the run, as a part that failed does; a file without a budget has
LEAST.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import yaml

BUDGETS = Path(__file__).parents[1] / "tests" / "budgets.yaml"
FACTOR = 3.0
LEAST = 5.0  # CPU seconds
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
        found = {file: max(1, round(cpu)) for file, cpu in sorted(by_file.items()) if cpu > LEAST / 2}
        BUDGETS.write_text(HEADER + yaml.safe_dump(found))
        return 1 if failed else 0
    budgets = yaml.safe_load(BUDGETS.read_text()) or {}
    over = [(file, cpu, budgets.get(file, LEAST)) for file, cpu in by_file.items()]
    over = [(file, cpu, budget) for file, cpu, budget in over if cpu > FACTOR * budget]
    for file, cpu, budget in over:
        print(
            f"test_report.py: error: {file} took {cpu:.0f} CPU s, more than {FACTOR:.0f} x its budget of {budget:g}; "
            "make it cheaper, or change tests/budgets.yaml with a reason",
            file=sys.stderr,
        )
    return 1 if over or failed else 0


if __name__ == "__main__":
    sys.exit(main())
