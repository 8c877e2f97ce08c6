"""Ctrl-C at a terminal: once saves and leaves, twice leaves at once; before the loop it leaves at once."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hpcrl.sandbox.process_tree import STOP_SIGNALS
from tests.preloaded import RANK
from tests.run.small_run import write_config
from tests.runtime.conftest import MPIEXEC, environment
from tests.runtime.test_ends import left_of

AGAIN = "press Ctrl-C again to leave at once"

# Rank 0 waits in the middle of a step, or in the thread that commits a checkpoint, until a file is there.
HELD = """
import time
from pathlib import Path
from hpcrl.controller.executor import Executor
from hpcrl.engine.checkpoint.store import CheckpointStore

folder = Path(__file__).parent
execute, commit = Executor._execute, CheckpointStore.commit

def hold(name):
    if (folder / "hold").exists():
        print("held in", name, flush=True)
    while (folder / "hold").exists():
        time.sleep(0.01)

def held_execute(self, command):
    if (command.method, command.meta.get("step"), self.world.rank) == ("update_actor", 2, 0):
        hold("update_actor")
    return execute(self, command)

def held_commit(self, step, *arguments):
    if step == 2:
        hold("commit")
    return commit(self, step, *arguments)

Executor._execute, CheckpointStore.commit = held_execute, held_commit
"""
# In the place of what takes long before the loop. A long call of C does not see an exception.
STARTS = "import time\nprint('starts', flush=True)\nfor _ in range(round({total} / {call})):\n    time.sleep({call})\n"


class Terminal:
    """A command in the foreground of a terminal of its own."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._file, end = pty.openpty()
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment(), stdin=end, stdout=end, stderr=end, preexec_fn=_take_terminal
        )
        os.close(end)
        self.text = ""

    def until(self, text: str) -> None:
        while text not in self.text:
            assert self._read(), f"no {text!r} in\n{self.text}"

    def press(self) -> None:
        os.write(self._file, b"\x03")

    def end(self) -> int:
        while self._read():
            pass
        return self.process.wait(10)

    def close(self) -> None:
        if self.process.poll() is None:
            for member in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
                member.kill()
        os.close(self._file)

    def _read(self) -> bool:
        assert select.select([self._file], [], [], 120)[0], f"nothing was printed for 120 s after\n{self.text}"
        try:
            text = os.read(self._file, 1 << 16)
        except OSError:  # all processes have left the terminal
            return False
        self.text += text.decode(errors="replace")
        return bool(text)


def _take_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    _default_sigint()


def _default_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background job of a shell ignores it


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """`terminal(2, "run.name=x")`: small_run's job on 2 ranks, or on one without a launcher."""
    opened: list[Terminal] = []

    def open_terminal(ranks: int, *overrides: str) -> Terminal:
        if not (tmp_path / "plugin.py").exists():
            (tmp_path / "plugin.py").write_text(HELD)
        trainer = {"total_training_steps": 4, "save_freq": 1}
        config = write_config(tmp_path, run={"name": "x", "dir": "runs", "plugins": ["plugin.py"]}, trainer=trainer)
        launcher = (str(MPIEXEC), "-n", str(ranks)) if ranks > 1 else ()
        opened.append(Terminal([*launcher, *RANK, "-m", "hpcrl", "train", str(config), *overrides], tmp_path))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


def exit_code(folder: Path) -> int:
    return json.loads((folder / "runs" / "x" / "exit.json").read_text())["code"]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "runs" / "x" / "checkpoints").glob("step_*"))


def test_once_saves_and_leaves(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    """Also where the ranks get the signal of one press twice."""
    (tmp_path / "hold").touch()
    job = terminal(2)
    job.until("held in update_actor")
    ranks = [child for child in psutil.Process(job.process.pid).children(recursive=True) if "-m" in child.cmdline()]
    job.press()
    job.until(AGAIN)
    for rank in ranks:
        rank.send_signal(signal.SIGINT)
    (tmp_path / "hold").unlink()
    assert job.end() == 85 == exit_code(tmp_path), job.text
    assert checkpoints(tmp_path)[-1] == "step_00000002" and "the next start continues from there" in job.text
    assert job.text.count(AGAIN) == 1 and "Traceback" not in job.text


@pytest.mark.parametrize("place", ["update_actor", "commit"])
def test_twice_leaves_at_once(terminal: Callable[..., Terminal], tmp_path: Path, place: str) -> None:
    """A checkpoint that is being written is discarded as a whole, and the next start continues from the one before."""
    (tmp_path / "hold").touch()
    override = "run.seed=1" if place == "update_actor" else "trainer.save_freq=2"
    (tmp_path / "plugin.py").write_text(
        HELD if place == "update_actor" else HELD.replace('"update_actor", 2', '"-", 2')
    )
    job = terminal(1, override)
    job.until(f"held in {place}")
    family = psutil.Process(job.process.pid).children(recursive=True)
    job.press()
    job.until(AGAIN)
    time.sleep(1.0)  # longer than what counts as one press
    begin = time.monotonic()
    job.press()
    assert job.end() == 130 == exit_code(tmp_path), job.text
    assert time.monotonic() - begin < 10 and left_of(family, 5) == []
    assert job.text.count("hpcrl: interrupted") == 1 and "Traceback" not in job.text
    assert checkpoints(tmp_path) == (["step_00000001"] if place == "update_actor" else ["step_00000002.tmp"])
    if place == "commit":
        (tmp_path / "hold").unlink()
        job = terminal(1, override)
        assert job.end() == 0, job.text
        assert checkpoints(tmp_path) == ["step_00000002", "step_00000004"]


@pytest.mark.parametrize(("ranks", "call"), [(2, 0.01), (1, 100.0)])
def test_before_the_loop_it_leaves_at_once(
    terminal: Callable[..., Terminal], tmp_path: Path, ranks: int, call: float
) -> None:
    (tmp_path / "plugin.py").write_text(STARTS.format(total=100, call=call))
    job = terminal(ranks)
    job.until("starts")
    begin = time.monotonic()
    job.press()
    assert job.end() == 130 == exit_code(tmp_path), job.text
    assert time.monotonic() - begin < 15
    assert job.text.count("hpcrl: interrupted") == 1 and "Traceback" not in job.text


def test_all_threads_of_a_job_block_the_signals(tmp_path: Path) -> None:
    """Else a thread that importing numpy starts takes a signal, whose default effect ends the job without a save."""
    script = tmp_path / "masks.py"
    script.write_text(
        "import os, sys\n"
        "from hpcrl import cli\n"
        "def masks(job, parsed, stop):\n"
        "    tasks = os.listdir('/proc/self/task')\n"
        "    lines = [line for task in tasks for line in open(f'/proc/self/task/{task}/status')]\n"
        "    print(len(tasks), *(line.split()[1] for line in lines if line.startswith('SigBlk')))\n"
        "    os._exit(not sys.stdout.flush())\n"
        "cli.run_on_ranks = masks\n"
        "cli.main(['train', 'x.yaml'])\n"
    )
    threads = {"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "3"}
    ended = subprocess.run(
        [sys.executable, script], env=environment(**threads), capture_output=True, text=True, preexec_fn=_default_sigint
    )
    count, *masks = ended.stdout.split()
    wanted = sum(1 << (number - 1) for number in STOP_SIGNALS)
    assert int(count) > 1 and len(masks) == int(count), "importing a job starts no thread: this test shows nothing"
    waiting = [mask for mask in masks if int(mask, 16) & wanted != wanted]
    assert len(waiting) == 1, "only the thread in sigwait receives the signals"


def test_a_job_whose_reader_has_ended_continues(tmp_path: Path) -> None:
    config = write_config(tmp_path, trainer={"total_training_steps": 2})
    reader, writer = os.pipe()
    os.close(reader)
    command = [*RANK, "-m", "hpcrl", "train", str(config)]
    ended = subprocess.run(command, env=environment(), cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert ended.returncode == 0 and "Broken" not in ended.stderr and "Traceback" not in ended.stderr, ended.stderr
