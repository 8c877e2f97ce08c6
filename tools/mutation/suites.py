"""A suite of tests under measurement: which tests execute which lines, and which of them notice a mutant."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutants import PACKAGES, Statements, digest, mutate

INSIDE = Path(__file__).with_name("inside")
# as in tools/test.sh; 0: no mpiexec. The quiet tests are left out: they compare times, which measuring changes.
PARTS = {"without MPI": 0, "1 rank": 1, "2 ranks": 2, "4 ranks": 4, "3 ranks": 3, "8 ranks": 8}
USUAL = ("without MPI", "1 rank", "2 ranks", "4 ranks")
ONLY = {"3 ranks": "tests/mpi/test_mpi_backend.py", "8 ranks": "tests/mpi/test_layout_matrix.py"}
LEFT_BEHIND = (".git", ".venv", ".venv-openmpi", ".mypy_cache", ".ruff_cache", ".pytest_cache", "runs", "data")

COVERAGE_RC = """[run]
core = ctrace
parallel = true
data_file = {data}/lines
patch = _exit
disable_warnings = no-data-collected, no-ctracer, module-not-measured, dynamic-conflict, trace-changed
include =
{include}
"""


class Problem(Exception):
    """What the user is told in one line."""


@dataclass
class Session:
    """What a pytest session, on one rank or several, has said by now; times in seconds after its start."""

    code: int | None = None
    seconds: float = 0.0
    begun: dict[str, float] = field(default_factory=dict)
    ended: dict[str, tuple[float, str, str]] = field(default_factory=dict)  # time, outcome, why

    @property
    def failed(self) -> str | None:
        return next((test for test, (_, outcome, _) in self.ended.items() if outcome == "failed"), None)

    @property
    def running(self) -> str | None:
        return next((test for test in reversed(self.begun) if test not in self.ended), None)


class Suite:
    """A private copy of a checkout, in which sessions run."""

    def __init__(self, checkout: Path, python: Path) -> None:
        if not (checkout / "tests").is_dir() or not (checkout / "hpcrl").is_dir():
            raise Problem(f"--suite {checkout}: expected a checkout with the folders tests and hpcrl")
        self.checkout, self.python = checkout, python
        self.folder = Path(tempfile.mkdtemp(prefix="mut_"))  # short: sockets have 108 characters
        self.root = self.folder / "hpcrl"
        shutil.copytree(checkout, self.root, symlinks=True, ignore=self._ignored)
        with suppress(FileExistsError):
            (self.root / "hpcrl" / "kernels").symlink_to("../kernels")
        (self.root / ".venv").symlink_to(python.parent.parent)

    def __enter__(self) -> Suite:
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ignored(self, folder: str, names: list[str]) -> set[str]:
        return set(names).intersection(LEFT_BEHIND) if Path(folder) == self.checkout else set()

    def session(
        self,
        part: str,
        tests: Iterable[str],
        *options: str,
        chosen: list[str] | None = None,
        seconds_per_test: float = 900,
        limit: float | None = None,
        until: Callable[[Session], bool] = lambda said: False,
        environment: dict[str, str] | None = None,
    ) -> Session:
        """Run it to its end, to `limit` seconds, or until it has said enough. Output goes to the file `log`."""
        said, size = Session(), PARTS[part]
        with tempfile.TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            (folder / "events").mkdir()
            (folder / "tmp").mkdir()
            given = os.environ | (environment or {}) | {"HPCRL_QUIET": "no", "OMP_NUM_THREADS": "1"}
            given |= {"PYTHONPATH": f"{self.root}{os.pathsep}{INSIDE}", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
            given |= {"MUTATION_EVENTS": str(folder / "events"), "HPCRL_TEST_SECONDS": str(seconds_per_test)}
            given |= {"PYTEST_DEBUG_TEMPROOT": str(folder / "tmp")}
            given.pop("PYTHONDONTWRITEBYTECODE", None)
            if chosen is not None:
                (folder / "tests").write_text("\n".join(chosen))
                given["MUTATION_TESTS"] = str(folder / "tests")
            command = [
                str(self.python),
                "-m",
                "pytest",
                "-p",
                "mutation_plugin",
                "-m",
                "not exhaustive",
                *tests,
                *options,
            ]
            if size:
                command = [str(self.python.with_name("mpiexec")), "-n", str(size), *command, "--timeout", "0"]
            else:
                command += ["--ignore=tests/mpi", "--ignore=tests/slurm", "--timeout", str(seconds_per_test)]
            start = time.monotonic()
            with (self.folder / "log").open("w") as log:
                process = subprocess.Popen(
                    command,
                    cwd=self.root,
                    env=given,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            try:
                while said.code is None:
                    with suppress(subprocess.TimeoutExpired):
                        said.code = process.wait(0.2)
                    said.seconds = time.monotonic() - start
                    read_events(folder / "events", said, start)
                    if until(said) or (limit is not None and said.seconds > limit):
                        break
            finally:
                end(process, str(folder))
        return said

    def last_line(self) -> str:
        lines = [line.strip() for line in (self.folder / "log").read_text(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line.strip("= ")), "it said nothing")[:300]


def read_events(folder: Path, said: Session, start: float) -> None:
    """Of all ranks and workers; a test has begun when the first has, and ended when all have."""
    begun, open_in, ended = {}, defaultdict(int), {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                break  # it is being written
            kind, test, at, *rest = json.loads(line)
            if kind == "begin":
                begun[test] = min(at - start, begun.get(test, at))
                open_in[test] += 1
            else:
                open_in[test] -= 1
                if ended.get(test, (0, ""))[1] != "failed":
                    ended[test] = (max(at - start, ended.get(test, (0.0,))[0]), *rest)
    said.begun = dict(sorted(begun.items(), key=lambda item: item[1]))
    said.ended = {test: told for test, told in ended.items() if not open_in[test] or told[1] == "failed"}


def end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End the session, and what it has started: the processes that have its folder in their environment."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)  # mpiexec ends its ranks
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"={mark}/".encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# coverage


def measure(suite: Suite, part: str, tests: list[str], workers: int) -> dict[str, Any]:
    """A part's tests with their seconds, and file -> test's number -> lines (hexadecimal; bit n is line n)."""
    import coverage

    data = suite.folder / "data"
    data.mkdir()
    config = suite.folder / "coverage.ini"
    include = "\n".join(f"    {suite.root}/hpcrl/{package}/*" for package in PACKAGES)
    config.write_text(COVERAGE_RC.format(data=data, include=include))
    environment = {"COVERAGE_PROCESS_START": str(config), "MUTATION_COVERAGE": str(Path(coverage.__file__).parents[1])}
    options = ["-n", str(workers), "--dist", "loadfile"] if workers > 1 and not PARTS[part] else []
    said = suite.session(part, of_part(part, tests), *options, environment=environment)
    if said.code not in (0, 1, 5):
        raise Problem(f"{part}: pytest ended with code {said.code}: {suite.last_line()}")
    if said.running is not None:
        raise Problem(
            f"{part}: the session ended inside {said.running}: {suite.last_line()}; "
            f"PYTEST_ADDOPTS=--deselect={said.running} leaves it out"
        )
    numbers = {test: number for number, test in enumerate(said.ended)}
    lines: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for path in data.glob("lines.*"):
        read = coverage.CoverageData(str(path))
        with suppress(coverage.exceptions.DataError):  # of a process that was killed while it wrote
            read.read()
        for file in read.measured_files():
            of_file = lines[str(Path(file).relative_to(suite.root))]
            for line, contexts in read.contexts_by_lineno(file).items():
                for number in (numbers[context] for context in contexts if context in numbers):
                    of_file[number] |= 1 << line
    shutil.rmtree(data)
    told = [
        {"test": test, "seconds": round(at - said.begun[test], 3), "outcome": outcome, "why": why}
        for test, (at, outcome, why) in said.ended.items()
    ]
    return {
        "startup": round(min(said.begun.values(), default=said.seconds), 1),
        "seconds": round(said.seconds, 1),
        "tests": told,
        "lines": {file: {test: f"{mask:x}" for test, mask in of_file.items()} for file, of_file in lines.items()},
    }


def of_part(part: str, tests: list[str]) -> list[str]:
    if part in ONLY:
        return [ONLY[part]]
    of_mpi = [test for test in tests if test.startswith("tests/mpi")]
    if PARTS[part]:
        return of_mpi or (["tests/mpi"] if "tests" in tests else [])
    return [test for test in tests if test not in of_mpi]


# mutants


class Questions:
    """What to ask coverage about a mutant."""

    def __init__(self, root: Path, files: Iterable[str]) -> None:
        self.root = root
        self.sources = {file: (root / file).read_text() for file in sorted(files)}

    def of(self, file: str, line: int) -> list[tuple[str, int]]:
        """(file, lines), the likeliest first: which tests execute one of these lines?

        A statement that runs when its module is imported is executed by none or by all. For it they are those that
        execute a body below the same function or class, then others of the module, then of modules that import it.
        """
        statements = Statements((self.root / file).read_text())
        wider = statements.wider(line)
        if not wider:
            return [(file, mask_of(*statements.around(line)))]
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        package, _, name = module.rpartition(".")
        imports = (f"{module} import", f"import {module}", f"{package} import {name}")
        return [(file, mask_of(first, last) & statements.in_functions) for first, last in wider] + [
            (other, Statements(source).in_functions)
            for other, source in self.sources.items()
            if any(text in source for text in imports)
        ]


def only_asked(measured: dict[str, Any], root: Path, mutants: list[dict[str, Any]]) -> dict[str, Any]:
    """A part of what `measure` returned: of each answer about these mutants one line."""
    questions: dict[str, set[int]] = defaultdict(set)
    of_files = Questions(root, measured["lines"])
    for mutant in mutants:
        for file, question in of_files.of(mutant["file"], mutant["line"]):
            questions[file].add(question)
    lines: dict[str, dict[str, str]] = defaultdict(dict)
    for file, of_file in measured["lines"].items():
        for test, text in of_file.items():
            answers, mask = 0, int(text, 16)
            for question in questions[file]:
                answers |= (mask & question) & -(mask & question)
            if answers:
                lines[file][test] = f"{answers:x}"
    return measured | {"lines": lines}


class Covering:
    """Which tests may notice a mutant."""

    def __init__(self, parts: dict[str, Any], root: Path) -> None:
        self.root, self.parts = root, parts
        self.seconds = {(part, each["test"]): each["seconds"] for part in parts for each in parts[part]["tests"]}
        self.masks: dict[str, dict[tuple[str, str], int]] = defaultdict(dict)
        for part, told in parts.items():
            passed = {n: each["test"] for n, each in enumerate(told["tests"]) if each["outcome"] == "passed"}
            for file, of_file in told["lines"].items():
                for number, mask in of_file.items():
                    if int(number) in passed:
                        self.masks[file][part, passed[int(number)]] = int(mask, 16)
        self.questions = Questions(root, self.masks)

    def of(self, file: str, line: int) -> list[tuple[str, str]]:
        """(part, test), the likeliest first: those that execute the statement, by their seconds."""
        found: dict[tuple[str, str], None] = {}
        for asked, wanted in self.questions.of(file, line):
            having = [test for test, mask in self.masks.get(asked, {}).items() if mask & wanted]
            found.update(dict.fromkeys(sorted(having, key=lambda test: (self.seconds[test], test))))
        return list(found)

    def within(self, tests: list[tuple[str, str]], seconds: float) -> dict[str, list[str]]:
        """By part, as many as can be run in that time, from the first on; parts that take least stand first.

        Tests of a file stand together, as their fixtures may be the module's.
        """
        spent: dict[str, float] = {}
        chosen: dict[str, list[str]] = {}
        for part, test in tests:
            cost = self.seconds[part, test] + (0 if part in spent else self.parts[part]["startup"])
            if sum(spent.values()) + cost <= seconds or not chosen:
                spent[part] = spent.get(part, 0.0) + cost
                chosen.setdefault(part, []).append(test)
        for part, names in chosen.items():
            files = list(dict.fromkeys(file_of(test) for test in names))
            chosen[part] = sorted(names, key=lambda test: files.index(file_of(test)))
        return dict(sorted(chosen.items(), key=lambda item: spent[item[0]]))


def file_of(test: str) -> str:
    return test.partition("::")[0]


def mask_of(first: int, last: int) -> int:
    last = min(last, 100_000)
    return (1 << (last + 1)) - (1 << first)


def check_sources(root: Path, sample: list[dict[str, Any]]) -> None:
    for mutant in sample:
        path = root / mutant["file"]
        if not path.is_file() or digest(path.read_text()) != mutant["sha256"]:
            raise Problem(
                f"{mutant['file']} of the suite is not that of the sample: give the suite the sample's hpcrl/"
            )


def check_tests(suite: Suite, covering: Covering) -> None:
    """One test of each part passes without a mutant, else all of them would seem to be killed."""
    for part in covering.parts:
        tests = [test for masks in covering.masks.values() for where, test in masks if where == part]
        if tests:
            test = min(tests, key=lambda test: (covering.seconds[part, test], test))
            said = suite.session(part, [file_of(test)], chosen=[test], limit=300)
            if said.code != 0:
                raise Problem(f"{part}: {test} fails without a mutant: {suite.last_line()}")


def try_mutant(suite: Suite, covering: Covering, mutant: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Run the tests that may notice it, until one does."""
    tests = covering.of(mutant["file"], mutant["line"])
    parts = covering.within(tests, seconds)
    result: dict[str, Any] = {"covering": len(tests), "run": 0, "result": "survived" if tests else "not covered"}
    path = suite.root / mutant["file"]
    source = path.read_text()
    mutated = mutate(source, mutant["operator"], mutant["occurrence"])
    if mutated is None:
        raise Problem(f"{mutant['file']}: no mutant {mutant['operator']} {mutant['occurrence']}: another cosmic-ray?")
    path.write_text(mutated)  # the time of the file is new, so that Python compiles it
    start = time.monotonic()
    try:
        for part, chosen in parts.items():
            if time.monotonic() - start >= seconds:
                break
            slowest = max(covering.seconds[part, test] for test in chosen)
            said = suite.session(
                part,
                list(dict.fromkeys(map(file_of, chosen))),
                "-x",
                chosen=chosen,
                seconds_per_test=patience(slowest),
                limit=seconds - (time.monotonic() - start),
                until=lambda said: said.failed is not None,
            )
            result["run"] += len(said.ended)
            result_of_part = verdict(said, covering, part, suite)
            if result_of_part:
                result |= {"part": part, **result_of_part}
                if result_of_part["result"] != "survived":
                    break
    finally:
        path.unlink()
        shutil.copy2(suite.checkout / mutant["file"], path)
    result["seconds"] = round(time.monotonic() - start, 1)
    return result


def patience(seconds: float) -> int:
    """For a test that takes that long without a mutant."""
    return round(30 + 5 * seconds)


def verdict(said: Session, covering: Covering, part: str, suite: Suite) -> dict[str, str] | None:
    """None: nothing was noticed."""
    if said.failed is not None:
        why = said.ended[said.failed][2]
        return {"result": "timeout" if "Timeout (>" in why else "killed", "by": said.failed, "why": why}
    if said.code in (0, 5):  # 5: the mutant has renamed the tests' parameters
        return None
    test = said.running
    if said.code is None:  # the time is up
        if test is None:
            slow = not said.begun and said.seconds > 3 * covering.parts[part]["startup"] + 30
        else:
            slow = said.seconds - said.begun[test] > 10 + 5 * covering.seconds[part, test]
        if slow:
            return {
                "result": "timeout",
                "by": test or f"start of {part}",
                "why": f"still runs after {said.seconds:.0f} s",
            }
        return {"result": "survived", "why": "the time was up before all chosen tests had run"}
    by = test or (f"start of {part}" if not said.begun else f"end of {part}")
    return {"result": "killed", "by": by, "why": f"pytest ended with code {said.code}: {suite.last_line()}"}
