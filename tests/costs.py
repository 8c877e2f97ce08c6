"""A pytest plugin that writes what each test cost: `-p tests.costs`, with HPCRL_TEST_COSTS=<folder>.

Each process of a session, be it a rank or a worker of pytest-xdist, writes a file of JSON lines [test, seconds, CPU
seconds]; `tools/test_report.py` makes the tables. CPU seconds are those of the process, of its children that
have ended, and of the ranks that its server of preloaded ranks has forked. "" is what lies outside the tests: imports,
collection, fixtures' ends.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tests import preloaded


def cpu_seconds() -> float:
    spent = preloaded.cpu_seconds()
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        spent += usage.ru_utime + usage.ru_stime
    return spent


class Costs:
    def __init__(self, folder: Path) -> None:
        self.file = (folder / f"{os.getpid()}.jsonl").open("w")
        self.begin = time.monotonic()
        self.inside = 0.0  # CPU seconds of tests

    def write(self, test: str, seconds: float, spent: float) -> None:
        self.file.write(json.dumps([test, round(seconds, 3), round(spent, 3)]) + "\n")
        self.file.flush()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        begin, before = time.monotonic(), cpu_seconds()
        try:
            return (yield)
        finally:
            spent = cpu_seconds() - before
            self.inside += spent
            self.write(item.nodeid, time.monotonic() - begin, spent)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self.write("", time.monotonic() - self.begin, cpu_seconds() - self.inside)
        self.file.close()


def pytest_configure(config: pytest.Config) -> None:
    if folder := os.environ.get("HPCRL_TEST_COSTS"):
        config.pluginmanager.register(Costs(Path(folder)), "costs")
