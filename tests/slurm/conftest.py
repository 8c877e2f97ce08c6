"""A Slurm of virtual nodes on this machine, for a whole session of tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from hpcrl.sandbox.fork_server import without_launcher_variables
from tests.runtime.conftest import REPOSITORY

LAB = REPOSITORY / "tools" / "slurm_lab.sh"
PROGRAMS = ("slurmctld", "slurmd", "sinfo", "munged")
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED")
PATIENCE = 300.0  # seconds for a job, unless a test says otherwise


@dataclass(frozen=True)
class Lab:
    """A running lab; `env` is the environment in which Slurm's commands find it."""

    folder: Path
    env: dict[str, str]

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """A command of Slurm's; gives what it prints, without the last line break."""
        done = subprocess.run(command, env=self.env, cwd=cwd, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout.rstrip("\n")

    def sbatch(self, arguments: Sequence[str | Path], cwd: Path) -> str:
        """Submits; gives the job's id."""
        return self.run("sbatch", "--parsable", *map(str, arguments), cwd=cwd)

    def state(self, job: str) -> str:
        """RUNNING, PENDING, COMPLETED, FAILED, ...; of a job that is over, its last attempt's."""
        return _field(self.run("scontrol", "show", "job", job), "JobState")

    def exit_code(self, job: str) -> int:
        return int(_field(self.run("scontrol", "show", "job", job), "ExitCode").split(":")[0])

    def restarts(self, job: str) -> int:
        return int(_field(self.run("scontrol", "show", "job", job), "Restarts"))

    def is_over(self, job: str) -> bool:
        return self.state(job) in OVER

    def wait(self, job: str, seconds: float = PATIENCE) -> str:
        """Waits until the job is over; gives its state. A job that takes longer is cancelled and fails the test."""
        give_up = time.monotonic() + seconds
        while not self.is_over(job):
            if time.monotonic() > give_up:
                self._give_up(job, f"not over after {seconds:.0f} s")
            time.sleep(0.05)
        return self.state(job)

    def until(self, condition: Callable[[], bool], what: str, job: str, seconds: float = PATIENCE) -> None:
        """Waits for something that a job does; the test fails where it ends, or takes too long, without."""
        give_up = time.monotonic() + seconds
        while not condition():
            if self.is_over(job) and not condition():
                self._give_up(job, f"{self.state(job)} before {what}")
            if time.monotonic() > give_up:
                self._give_up(job, f"not {what} after {seconds:.0f} s")
            time.sleep(0.05)

    def lose(self, node: str) -> None:
        """Kill everything on a node at once: slurmd, its step daemons, and what they have started."""
        slurmd = int((self.folder / "run" / f"slurmd.{node}.pid").read_text())
        processes = [psutil.Process(slurmd), *_of_node(self, node)]
        for act in (psutil.Process.suspend, psutil.Process.kill):  # none of them sees that another one has ended
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    act(process)

    def _give_up(self, job: str, why: str) -> NoReturn:
        description = self.run("scontrol", "show", "job", job)
        self.run("scancel", job)
        output = Path(_field(description, "StdOut"))
        last = output.read_text(errors="replace")[-3000:] if output.is_file() else ""
        pytest.fail(f"job {job}: {why}\n{last}")


def _of_node(lab: Lab, node: str) -> set[psutil.Process]:
    """The processes of jobs on a node, and the step daemons above them."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environ = process.environ()
            if environ.get("SLURMD_NODENAME") == node and environ.get("SLURM_CONF") == lab.env["SLURM_CONF"]:
                found |= {process, *(one for one in process.parents() if one.name() == "slurmstepd")}
    return found


def _field(text: str, name: str) -> str:
    return next(word.partition("=")[2] for word in text.split() if word.startswith(f"{name}="))


def missing() -> str | None:
    """The first program that is not here."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    return next((program for program in PROGRAMS if shutil.which(program, path=path) is None), None)


def start(nodes: int) -> Iterator[Lab]:
    absent = missing()
    if absent is not None:
        why = f"no {absent} here: `tools/slurm_lab.sh install` as root"
        if os.environ.get("HPCRL_REQUIRE_SLURM") == "1":
            pytest.fail(f"the Slurm tests have to run, and there is {why}")
        pytest.skip(f"left out, {why}")
    folder = Path(tempfile.mkdtemp(prefix="slurm_lab_"))
    # A shell variable of a job that runs these tests would describe another job.
    env = without_launcher_variables(dict(os.environ)) | {
        "SLURM_CONF": str(folder / "etc" / "slurm.conf"),
        "OMP_NUM_THREADS": "1",
    }
    # Slurm's pmi2 reads 1,024 bytes of a request, see `start_mpi`: with these, the longest has 680, else 820 to 970.
    env |= {"UCX_TLS": "self,posix,tcp", "UCX_PROTO_ENABLE": "n"}
    env["HPCRL_MPI_START_SECONDS"] = "60"  # after a longer one, ranks may also wait for each other
    env["SLURM_LAB_KILL_WAIT"] = "1"  # seconds that the other ranks live on after a kill
    env["HPCRL_MAX_RELAUNCHES"] = "0"  # a loss ends a slice, unless a test is about starts inside of one
    try:
        subprocess.run([LAB, "up", folder, str(nodes)], check=True, env=env, stdout=subprocess.DEVNULL, timeout=60)
        yield Lab(folder, env)
    finally:
        subprocess.run([LAB, "down", folder], env=env, timeout=120)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Two nodes."""
    yield from start(2)


@pytest.fixture
def losing_lab() -> Iterator[Lab]:
    """Four nodes that a test may lose."""
    for lab in start(4):
        yield Lab(lab.folder, lab.env | {"HPCRL_MAX_RELAUNCHES": "10", "HPCRL_NODE_TIMEOUT": "5"})


@pytest.fixture(scope="session")
def unbroken(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small job on 2 ranks without an interruption: the folder of its run."""
    from tests.slurm.small_ppo import environment, of_ranks, write_job

    folder = tmp_path_factory.mktemp("unbroken")
    job = environment(lab, folder).sbatch([*of_ranks(2), write_job(folder), "whole"], cwd=folder)
    assert lab.wait(job) == "COMPLETED", (folder / "job.out").read_text()
    return folder / "runs" / "whole"


@pytest.fixture(scope="session")
def large_lab() -> Iterator[Lab]:
    """Eight nodes."""
    yield from start(8)
