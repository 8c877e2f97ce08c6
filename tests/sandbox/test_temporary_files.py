"""Temporary files of killed jobs: removed by the next start of the user, and of no other processes."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import util
from pathlib import Path

import psutil
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from hpcrl.sandbox import fork_server
from hpcrl.sandbox.process_tree import boot_id, pid_namespace
from tests.other_user import OTHER
from tests.runtime.conftest import start  # noqa: F401  # fixture

# A rank with a worker; says where its temporary files are once the worker has said where its own are.
RANK = """
import time
from functools import partial
from multiprocessing import util
from pathlib import Path
from hpcrl.sandbox import fork_server, worker

WORK = "import tempfile, time, pathlib; pathlib.Path('worker').write_text(tempfile.gettempdir()); time.sleep(1000)"

if __name__ == "__main__":
    removed = fork_server.start()
    Path("worker").unlink(missing_ok=True)
    fork_server.spawn(worker.supervise, (partial(exec, WORK),))
    while not Path("worker").exists() or not Path("worker").read_text():
        time.sleep(0.02)
    print(util.get_temp_dir(), *removed, flush=True)
    time.sleep(1000)
"""


def begin(start: Callable, folder: Path, removes: Sequence[Path] = ()) -> tuple[Path, list[psutil.Process]]:  # noqa: F811
    """A rank's folder for temporary files, and its processes. removes: the folders that it says it has removed."""
    (folder / "rank.py").write_text(RANK)
    rank: subprocess.Popen[str] = start(sys.executable, folder / "rank.py", TMPDIR=str(folder / "t"))
    assert rank.stdout is not None
    made, *removed = rank.stdout.readline().split() or [""]
    assert made, rank.communicate()
    assert removed == list(map(str, removes))
    process = psutil.Process(rank.pid)
    return Path(made), [process, *process.children(recursive=True)]


def kill(processes: list[psutil.Process]) -> None:
    """All at a moment, as a batch system does."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    for process in processes:
        process.kill()
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive


def test_leftovers_of_killed_jobs_are_removed(start: Callable, tmp_path: Path) -> None:  # noqa: F811
    temporary = tmp_path / "t"  # sockets are in it, and the system bounds the length of their paths
    temporary.mkdir()
    lives, its_processes = begin(start, tmp_path)
    killed, processes = begin(start, tmp_path)
    assert lives.parent == killed.parent == temporary
    assert Path((tmp_path / "worker").read_text()).parent == killed  # one folder for a rank and its workers
    kill(processes)
    assert sorted(path.name for path in killed.iterdir())[-1].startswith("tmp")  # the worker's is still there
    victim = tmp_path / "victim"
    victim.mkdir()
    (killed / "link").symlink_to(victim)

    ended = (killed / fork_server.PROCESSES_FILE).read_text()
    kept = {
        "pymp-no_record": None,
        "pymp-cut": ended[: len(ended) // 3],
        "pymp-other_boot": ended.replace(boot_id(), "0" * 8),
        "pymp-other_namespace": ended.replace(pid_namespace(), "pid:[1]"),
        "pymp-server_runs": ended + (lives / fork_server.PROCESSES_FILE).read_text(),
        "other-name": ended,
    }
    for name, record in kept.items():
        (temporary / name).mkdir()
        if record is not None:
            (temporary / name / fork_server.PROCESSES_FILE).write_text(record)
    (victim / fork_server.PROCESSES_FILE).write_text(ended)
    (temporary / "pymp-link").symlink_to(victim)
    expected = {lives.name, *kept, "pymp-link"}
    if os.geteuid() == 0:
        (temporary / "pymp-of_another_user").mkdir()
        (temporary / "pymp-of_another_user" / fork_server.PROCESSES_FILE).write_text(ended)
        os.chown(temporary / "pymp-of_another_user", OTHER.pw_uid, -1)
        expected.add("pymp-of_another_user")

    third, _ = begin(start, tmp_path, removes=[killed])
    assert {path.name for path in temporary.iterdir()} == {third.name, *expected}
    assert [path.name for path in victim.iterdir()] == [fork_server.PROCESSES_FILE]
    assert all(process.is_running() for process in its_processes)


def test_compiled_code_of_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    usual = Path(default_cache_dir())

    def chosen() -> Path:
        fork_server.set_compiler_cache()
        return Path(os.environ.pop("TORCHINDUCTOR_CACHE_DIR"))

    assert chosen() == chosen() == usual and stat.S_IMODE(usual.stat().st_mode) == 0o700
    usual.chmod(0o770)
    assert chosen().parent == Path(util.get_temp_dir())
    usual.rename(tmp_path / "moved")
    usual.symlink_to(tmp_path / "moved")
    assert chosen().parent == Path(util.get_temp_dir())


def test_what_mpiexec_left_is_removed_unless_its_proxy_may_run(start: Callable, tmp_path: Path, monkeypatch) -> None:  # noqa: F811
    def make(name: str, seconds_ago: float) -> Path:
        path = tmp_path / name
        path.touch()
        os.utime(path, (time.time() - seconds_ago,) * 2)
        return path

    def left() -> set[str]:
        fork_server.remove_leftovers_of_mpiexec(str(tmp_path))
        return {path.name[-1] for path in tmp_path.glob("hydra_hwloc_xmlfile_*")}

    (tmp_path / "hydra_pmi_proxy").symlink_to("/bin/sleep")
    proxy = start(tmp_path / "hydra_pmi_proxy", "1000")
    while proxy.pid not in fork_server._proxies():
        assert proxy.poll() is None
    monkeypatch.setattr(fork_server, "_proxies", lambda: iter([proxy.pid]))  # others may be of other tests
    make("hydra_hwloc_xmlfile_a", 3 * 3600)
    make("hydra_hwloc_xmlfile_b", 1800)
    (tmp_path / "hydra_hwloc_xmlfile_c").symlink_to(make("other", 3 * 3600))
    os.utime(tmp_path / "hydra_hwloc_xmlfile_c", (0, 0), follow_symlinks=False)
    assert left() == {"b"} and (tmp_path / "other").exists()

    monkeypatch.setattr(fork_server, "SECONDS_TO_START", -60.0)  # so that files of this moment are looked at
    monkeypatch.setattr(fork_server, "CLOCK_ERROR", 0.0)
    make("hydra_hwloc_xmlfile_d", 0)
    assert left() == {"d"}
    proxy.kill()
    proxy.wait()
    assert left() == set()
