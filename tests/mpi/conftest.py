"""SPMD test sessions: `mpiexec -n N python -m pytest tests/mpi` runs one session on N ranks, in step.

Every rank collects the same tests and runs them in the same order. After each phase of each test (set-up, call,
tear-down) the ranks agree on the outcome: a failure on one rank is a failure on all, and rank 0 shows that rank's
report. A rank that fails while others are stuck inside the test prints its report and ends the job.

Fixtures: `world` (hpcrl.runtime.world.World, started once per session), `world_tmp_path` (one folder for all ranks).
Markers: `world(2, 4)` runs a test at these world sizes only; `ci_world(2)` runs it at these always, and at the others
that it is valid for under --exhaustive; `slow_world(4)` makes it slow at these.
"""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import hypothesis
import pytest

from hpcrl.runtime.mpi import all_gather_object, wait_until
from hpcrl.runtime.world import World, finish, kill_job, start_mpi, start_torch
from hpcrl.sandbox import fork_server

if TYPE_CHECKING:
    from hpcrl.runtime.groups import RoleGroups
    from tests.mpi.lab import Lab

SECONDS_OF_GRACE = 5.0  # a rank that failed waits this long for the others to end the same phase
SECONDS_PER_TEST = float(os.environ.get("HPCRL_TEST_SECONDS", "300"))  # then every stack is shown and the job ends

# the same examples on every rank
hypothesis.settings.register_profile("spmd", hypothesis.settings.default, derandomize=True, database=None)
hypothesis.settings.load_profile("spmd")


class Ranks:
    """The ranks of a session, kept in step over a communicator that no test sees; a pytest plugin."""

    def __init__(self, config: pytest.Config):
        with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            self.stderr = os.dup(2)
        fork_server.start()
        self.comm = start_mpi()
        self.private = self.comm.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.exit_status = int(pytest.ExitCode.USAGE_ERROR)
        self.collect_errors: list[str] = []
        if self.rank != 0:
            config.pluginmanager.getplugin("terminalreporter")._tw._file = open(os.devnull, "w")
            if (cache := getattr(config, "cache", None)) is not None:  # it has none with -p no:cacheprovider
                cache.set = lambda key, value: None  # type: ignore[method-assign]

    def agree(self, place: str, value: Any, report: str | None = None) -> list[Any]:
        """Every rank's `value`, once all ranks are at `place`. `report` is this rank's failure, if it has one.

        Ends the job when the ranks are at different places, or when the others do not come.
        """
        give_up = time.monotonic() + (SECONDS_PER_TEST if report is None else SECONDS_OF_GRACE)
        arrived = self.private.Ibarrier()

        def all_here() -> bool:
            if arrived.Test():
                return True
            if time.monotonic() > give_up:
                self.die(f"{place}: the other ranks did not come\n{report or ''}")
            return False

        wait_until(all_here)
        said = all_gather_object(self.private, (place, value))
        if any(other != place for other, _ in said):
            places = "\n".join(f"rank {rank}: {place}" for rank, (place, _) in enumerate(said))
            self.die(f"ranks are at different places:\n{places}")
        return [value for _, value in said]

    def tell(self, text: str) -> None:
        os.write(self.stderr, f"\n[rank {self.rank}] {text}\n".encode(errors="replace"))

    def die(self, text: str) -> NoReturn:
        self.tell(text)
        time.sleep(0.5)  # mpiexec drops what it has not forwarded when MPI_Abort arrives
        kill_job(int(pytest.ExitCode.TESTS_FAILED))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        markers = [(item, item.get_closest_marker("world")) for item in items]
        left_out = [item for item, marker in markers if marker is not None and self.size not in marker.args]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in left_out]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.collect_errors.append(report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        everyone = self.agree("collection", ([item.nodeid for item in session.items], self.collect_errors))
        if all(said == everyone[0] for said in everyone):
            return  # errors that all have alike are told by pytest
        for rank, (nodes, errors) in enumerate(everyone):
            if self.rank == 0 and (nodes, errors) != everyone[0]:
                missing, extra = set(everyone[0][0]) - set(nodes), set(nodes) - set(everyone[0][0])
                differ = f"rank {rank} collected other tests than rank 0: without {missing}, with {extra}"
                self.tell("\n".join([differ, *errors]))
        raise session.Failed("the ranks collected different tests")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        faulthandler.dump_traceback_later(SECONDS_PER_TEST, exit=True, file=self.stderr)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        text = None
        if report.failed:
            text = "\n".join([report.longreprtext, *(f"--- {name}\n{content}" for name, content in report.sections)])
        everyone = self.agree(f"{item.nodeid} ({report.when})", (report.outcome, text), text)
        others = [f"[rank {rank}]\n{text}" for rank, (outcome, text) in enumerate(everyone) if outcome == "failed"]
        if not others and any(outcome != report.outcome for outcome, _ in everyone):
            outcomes = ", ".join(f"rank {rank} {outcome}" for rank, (outcome, _) in enumerate(everyone))
            others = [f"the ranks differ: {outcomes}"]
        if others and not report.failed:
            report.outcome = "failed"
            report.longrepr = "\n".join(others)
        return report

    def pytest_internalerror(self, excrepr: object) -> None:
        if self.rank != 0:
            self.tell(f"pytest itself failed:\n{excrepr}")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.exit_status = int(exitstatus)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        finish(max(self.agree("end of the session", self.exit_status)))


@pytest.hookimpl(trylast=True)  # the terminal reporter must be there
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Ranks(config), "ranks")
    from hpcrl.runtime.platform import import_megatron  # not before MPI has started: it imports torch

    import_megatron()


@pytest.hookimpl(tryfirst=True)  # pytest's -m must see the markers that are added here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    size = config.pluginmanager.getplugin("ranks").size
    for item in items:
        usual = item.get_closest_marker("ci_world")
        if usual is not None and size not in usual.args:
            item.add_marker(pytest.mark.exhaustive)
        seldom = item.get_closest_marker("slow_world")
        if seldom is not None and size in seldom.args:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> World:
    return start_torch(request.config.pluginmanager.getplugin("ranks").comm)


@pytest.fixture(scope="session")
def groups(world: World) -> dict[str, RoleGroups]:
    """This rank's of every layout of the world, see `tests.mpi.layouts.role_groups`."""
    from tests.mpi.layouts import role_groups  # not before MPI has started: it imports torch

    return role_groups(world.rank, world.size)


@pytest.fixture
def world_tmp_path(world: World, tmp_path: Path) -> Path:
    """Rank 0's tmp_path on every rank."""
    return world.broadcast_object(tmp_path)


@pytest.fixture(scope="session")
def countdown_files(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The countdown data, made once by rank 0."""
    from tests.mpi.lab import make_countdown_files  # not before MPI has started: it imports torch

    folder = Path(world.broadcast_object(str(tmp_path_factory.mktemp("data")) if world.rank == 0 else None))
    if world.rank == 0:
        make_countdown_files(folder)
    world.barrier()
    return folder


@pytest.fixture(scope="session")
def lab(world: World, countdown_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Small whole jobs."""
    from tests.mpi.lab import Lab

    folder = world.broadcast_object(str(tmp_path_factory.mktemp("runs")) if world.rank == 0 else None)
    return Lab(world, countdown_files, Path(folder))


@pytest.fixture
def straight(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`straight(name, placement, **sections)`: a run that keeps the logs of all its steps."""

    from hpcrl.run.recovery import DurableRollouts

    def run(name: str, placement: dict[str, Any], **sections: dict[str, Any]) -> Path:
        with monkeypatch.context() as patch:
            patch.setattr(DurableRollouts, "_keep", lambda self, is_needed: None)
            return lab.run(name, placement, **sections)

    return run
