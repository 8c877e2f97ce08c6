"""A pytest plugin: writes when tests begin and end (MUTATION_EVENTS, a folder), and runs those chosen (MUTATION_TESTS).

Each process of a session writes JSON lines of its own: ["begin", test, time] and ["end", test, time, outcome, why].
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest


class Events:
    def __init__(self, folder: str) -> None:
        self.file = Path(folder, f"{os.getpid()}.jsonl").open("a")
        self.outcome, self.why = "", ""

    def write(self, *event: Any) -> None:
        self.file.write(json.dumps(event) + "\n")
        self.file.flush()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.outcome, self.why = "passed", ""
        self.write("begin", item.nodeid, time.monotonic())
        switch(item.nodeid)
        try:
            return (yield)
        finally:
            switch("")
            self.write("end", item.nodeid, time.monotonic(), self.outcome, self.why)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed" and self.outcome != "failed":
            self.outcome = report.outcome
            lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
            self.why = lines[0][1:].strip()[:200] if lines else report.longreprtext.strip()[-200:]


def switch(context: str) -> None:
    coverage = sys.modules.get("coverage")
    measured = coverage.Coverage.current() if coverage else None
    if measured is not None:
        measured.switch_context(context)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "MUTATION_TESTS" in os.environ:
        chosen = Path(os.environ["MUTATION_TESTS"]).read_text().splitlines()
        place = {test: number for number, test in enumerate(chosen)}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in place])
        items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])


def pytest_configure(config: pytest.Config) -> None:
    if folder := os.environ.get("MUTATION_EVENTS"):
        config.pluginmanager.register(Events(folder), "mutation_events")
