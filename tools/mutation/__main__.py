"""Mutation testing: what a suite of tests notices, so that a faster one can be shown to notice as much.

    MUTATION=python with the extra `mutation`, of the same version as the Python that runs the tests
    $MUTATION tools/mutation sample --out sample.json --count 150 --seed 0
    $MUTATION tools/mutation coverage --suite OLD --sample sample.json --out old.json.gz    # and NEW, a checkout each
    $MUTATION tools/mutation run --suite OLD --sample sample.json --coverage old.json.gz --out old.jsonl
    $MUTATION tools/mutation report old.jsonl new.jsonl

All suites have the hpcrl/ of the sample; only their tests/ differ. The suite runs in a private copy of the checkout, by
--python, which is .venv/bin/python of the suite, else of this checkout. `coverage` takes one part at a time and goes on
where it was stopped, as `run` does with mutants. A test that fails or is skipped while it is measured kills no mutant.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mutants import PACKAGES, sample
from suites import (
    PARTS,
    USUAL,
    Covering,
    Problem,
    Suite,
    check_sources,
    check_tests,
    measure,
    of_part,
    only_asked,
    try_mutant,
)

ROOT = Path(__file__).resolve().parents[2]
KILLED = ("killed", "timeout")
RESULTS = (*KILLED, "survived", "not covered")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="mutation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("sample", help="draw mutants of this checkout")
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--count", type=int, default=150)
    command.add_argument("--seed", type=int, default=0)
    command = commands.add_parser("coverage", help="which tests execute which lines")
    of_suite(command)
    command.add_argument("--sample", type=Path, help="keep only what `run` asks about these mutants")
    command.add_argument("--tests", nargs="+", default=["tests"], help="folders and files; all tests if not given")
    command.add_argument("--parts", nargs="+", default=list(USUAL), choices=list(PARTS), metavar="PART")
    command.add_argument("--workers", type=int, default=1, help="of pytest-xdist, for the tests without MPI")
    command = commands.add_parser("run", help="try the mutants")
    of_suite(command)
    command.add_argument("--sample", type=Path, required=True)
    command.add_argument("--coverage", type=Path, required=True)
    command.add_argument("--seconds", type=float, default=120, help="for a mutant at most")
    command.add_argument("--packages", nargs="+", choices=PACKAGES, default=list(PACKAGES), metavar="PACKAGE")
    command.add_argument("--count", type=int, help="stop after so many mutants")
    command = commands.add_parser("report", help="compare results")
    command.add_argument("results", type=Path, nargs="+")
    arguments = parser.parse_args()
    # so that a session under way is ended, and its folder removed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("mutation: stopped; the same command goes on"))
    try:
        {"sample": draw, "coverage": cover, "run": run, "report": report}[arguments.command](arguments)
    except (Problem, OSError, json.JSONDecodeError) as error:
        print(f"mutation: error: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        print(f"mutation: error: {error}; use an environment with hpcrl's extra `mutation`", file=sys.stderr)
        return 1
    return 0


def of_suite(command: argparse.ArgumentParser) -> None:
    command.add_argument("--suite", type=Path, required=True, metavar="DIR", help="a checkout")
    command.add_argument("--python", type=Path, help="the Python that runs the tests")
    command.add_argument("--out", type=Path, required=True)


def open_suite(arguments: argparse.Namespace) -> Suite:
    known = [path / ".venv" / "bin" / "python" for path in (arguments.suite, ROOT)]
    python = arguments.python or next((path for path in known if path.exists()), known[0])
    python = Path(os.path.abspath(python))  # not resolved: the link is what makes it the environment's
    if not python.exists():
        raise Problem(f"no Python at {python}; name that of the tests' environment with --python")
    asked = "import sys; print(*sys.version_info[:2], sep='.')"
    version = subprocess.run([python, "-c", asked], capture_output=True, text=True).stdout.strip()
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if version != own:
        raise Problem(f"the tests run with Python {version}, and this is {own}: coverage.py has one build for each")
    return Suite(arguments.suite.resolve(), python)


def draw(arguments: argparse.Namespace) -> None:
    mutants = sample(ROOT, arguments.count, arguments.seed)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    write(arguments.out, {"commit": commit, "seed": arguments.seed, "mutants": mutants})
    for package in PACKAGES:
        print(f"{package:<16} {sum(mutant['package'] == package for mutant in mutants):>4}")


def cover(arguments: argparse.Namespace) -> None:
    told = read(arguments.out) if arguments.out.exists() else {"tests": arguments.tests, "parts": {}}
    mutants = read(arguments.sample)["mutants"] if arguments.sample else None
    if told["tests"] != arguments.tests:
        raise Problem(f"{arguments.out} is about the tests {told['tests']}; give another --out")
    for part in arguments.parts:
        if part in told["parts"] or not of_part(part, arguments.tests):
            continue
        with open_suite(arguments) as suite:
            if mutants is not None:
                check_sources(suite.root, mutants)
            measured = measure(suite, part, arguments.tests, arguments.workers)
            told["parts"][part] = measured if mutants is None else only_asked(measured, suite.root, mutants)
        write(arguments.out, told)
        counts = [
            sum(each["outcome"] == outcome for each in measured["tests"]) for outcome in ("passed", "failed", "skipped")
        ]
        print(
            f"{part}: {counts[0]} passed, {counts[1]} failed, {counts[2]} skipped in {measured['seconds']} s",
            flush=True,
        )
        for each in measured["tests"]:
            if each["outcome"] == "failed":
                print(f"  failed while it was measured, so it kills no mutant: {each['test']}: {each['why']}")


def run(arguments: argparse.Namespace) -> None:
    mutants = read(arguments.sample)["mutants"]
    done = {key(result) for result in results_of(arguments.out)} if arguments.out.exists() else set()
    pending = [mutant for mutant in mutants if key(mutant) not in done and mutant["package"] in arguments.packages]
    pending = pending[: arguments.count]
    with open_suite(arguments) as suite:
        check_sources(suite.root, mutants)
        covering = Covering(read(arguments.coverage)["parts"], suite.root)
        if pending:
            check_tests(suite, covering)
        for number, mutant in enumerate(pending, 1):
            result = mutant | try_mutant(suite, covering, mutant, arguments.seconds)
            with arguments.out.open("a") as file:
                file.write(json.dumps(result) + "\n")
            where = f"{mutant['file']}:{mutant['line']} {mutant['operator']}"
            print(f"{number}/{len(pending)} {time.strftime('%H:%M:%S')} {where}: {told_of(result)}", flush=True)


def told_of(result: dict[str, Any]) -> str:
    ran = f"{result['run']} of {result['covering']} covering tests ended, {result['seconds']} s"
    return f"{result['result']}{' by ' + result['by'] if 'by' in result else ''} ({ran})"


def key(mutant: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(mutant[name] for name in ("file", "sha256", "operator", "occurrence"))


def results_of(path: Path) -> list[dict[str, Any]]:
    """A last line without an end was being written when the run was stopped."""
    lines = path.read_text().splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        path.write_text("".join(lines[:-1]))
        lines = lines[:-1]
    return [json.loads(line) for line in lines]


def report(arguments: argparse.Namespace) -> None:
    """Of the mutants that all the files have a result for."""
    told = [{key(result): result for result in results_of(path)} for path in arguments.results]
    common = [mutant for mutant in told[0] if all(mutant in results for results in told)]
    names = [path.stem for path in arguments.results]
    width = max(16, *map(len, names))
    print(f"{'package':<16} {'mutants':>7} " + " ".join(f"{name:>{width}}" for name in names))
    for package in (*PACKAGES, "all"):
        of_package = [mutant for mutant in common if package in ("all", told[0][mutant]["package"])]
        if of_package:
            shares = [
                sum(results[mutant]["result"] in KILLED for mutant in of_package) / len(of_package) for results in told
            ]
            print(f"{package:<16} {len(of_package):>7} " + " ".join(f"{share:>{width}.1%}" for share in shares))
    for name, results in zip(names, told, strict=True):
        counts = {kind: sum(results[mutant]["result"] == kind for mutant in common) for kind in RESULTS}
        print(f"\n{name}: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()) + " (a timeout is a kill)")
        if left_out := len(results) - len(common):
            print(f"{left_out} results are left out: other files have none for these mutants")
    alive = [mutant for mutant in common if any(results[mutant]["result"] not in KILLED for results in told)]
    if alive:
        print("\nnot killed")
    for mutant in alive:
        result = told[0][mutant]
        outcomes = "; ".join(f"{name}: {told_of(results[mutant])}" for name, results in zip(names, told, strict=True))
        changed = "\n".join(f"    {line}" for line in result["diff"].splitlines()[3:])
        print(f"{result['file']}:{result['line']} {result['operator']}\n  {outcomes}\n{changed}")


def read(path: Path) -> Any:
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)


def write(path: Path, content: Any) -> None:
    text = (json.dumps(content, indent=1) + "\n").encode()
    draft = path.with_name(f"{path.name}.draft")
    draft.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    draft.replace(path)


if __name__ == "__main__":
    sys.exit(main())
