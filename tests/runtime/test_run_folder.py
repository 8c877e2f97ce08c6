"""Run folders that another user made, can write to, or can exchange: refused, and nothing is written."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcrl.runtime import run_folder
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.run_folder import make_directory
from tests.other_user import OTHER, as_other_user, needs_other_user, shared  # noqa: F401  # fixture
from tests.preloaded import RANK
from tests.run.small_run import write_config
from tests.runtime.conftest import MPIEXEC, REPOSITORY, Ended, run, start  # noqa: F401  # fixtures


@pytest.fixture
def places(shared: Path) -> Iterator[Path]:  # noqa: F811
    """A folder of the user's in one where all can write, under a usual umask."""
    umask = os.umask(0o022)
    run_folder._warn.cache_clear()
    (shared / "mine").mkdir()
    yield shared / "mine"
    os.umask(umask)


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        make_directory(path, is_shared=False)
    assert "\n" not in str(caught.value) and "nothing was written" in str(caught.value)
    return str(caught.value)


TRAPS = """
config.yaml metrics.jsonl exit.json trackers.json.tmp verdict.md logs/rank_00000.log heartbeat/rank_00000
checkpoints/latest generate/config.yaml rollouts/step_00000001.h5.tmp
"""


def set_traps(folder: Path, target: Path) -> None:
    """A folder in which all users can write, where names of a run's files are links to `target`."""
    folder.mkdir(mode=0o777)
    for name in TRAPS.split():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(target)


@needs_other_user
@pytest.mark.parametrize("job", ["train", "generate"])
def test_a_job_writes_nothing_to_a_folder_that_another_user_made(
    run: Callable[..., Ended],  # noqa: F811
    tmp_path: Path,
    places: Path,
    job: str,
) -> None:
    victim = tmp_path / "keys"
    victim.write_text("secret")
    runs = places.parent
    as_other_user(lambda: set_traps(runs / "ends", victim))
    before = sorted(runs.rglob("*"))
    config = write_config(tmp_path, run={"name": "ends", "dir": str(runs)})
    ended = run(MPIEXEC, "-n", "1", *RANK, "-m", "hpcrl", job, config)
    assert ended.code == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"hpcrl: error: the run directory {runs}/ends is owned by nobody (mode drwxrwxrwx), not by ")
    assert victim.read_text() == "secret" and sorted(runs.rglob("*")) == before


def test_a_new_folder_is_for_its_user_and_one_that_others_can_write_to_is_refused(places: Path) -> None:
    for mode in (0o700, 0o750, 0o755):
        make_directory(places / f"{mode:o}", is_shared=False)
        assert stat.S_IMODE((places / f"{mode:o}").stat().st_mode) == 0o700
        (places / f"{mode:o}").chmod(mode)
        make_directory(places / f"{mode:o}", is_shared=False)
    for mode in (0o770, 0o722, 0o2775, 0o1777):
        open_folder = places / f"{mode:o}"
        open_folder.mkdir()
        open_folder.chmod(mode)
        line = refusal(open_folder)
        assert f"(mode {stat.filemode(open_folder.stat().st_mode)})" in line and f"chmod go-w {open_folder}" in line


@needs_other_user
def test_what_another_user_has_put_into_a_folder_is_refused_at_any_depth(places: Path) -> None:
    def link(where: Path) -> None:
        as_other_user(lambda: where.symlink_to("/etc/passwd"))

    for number, (act, inside) in enumerate(
        [
            (link, "metrics.jsonl"),
            (link, "rollouts/step_00000007.h5.tmp"),
            (lambda where: as_other_user(where.touch), "checkpoints/step_00000001/actor/common.pt"),
            (lambda where: as_other_user(where.mkdir), "tensorboard/plugins"),
            (lambda where: as_other_user(lambda: os.mkfifo(where)), "logs/rank_00001.log"),
        ]
    ):
        folder = places / f"run_{number}"
        where = folder / inside
        where.parent.mkdir(parents=True)
        where.parent.chmod(0o777)
        act(where)
        where.parent.chmod(0o755)  # as a user does who reads that it can be written to
        folder.chmod(0o700)
        assert f"{where} is owned by nobody" in refusal(folder)


def test_folders_inside_that_others_can_reach_and_write_to_are_refused(places: Path) -> None:
    logs = places / "run" / "logs"
    logs.mkdir(parents=True)
    logs.chmod(0o777)
    assert f"{logs} is owned by" in refusal(logs.parent)
    logs.chmod(0o775)
    logs.parent.chmod(0o701)  # others can pass, its group cannot
    make_directory(logs.parent, is_shared=False)
    logs.chmod(0o777)
    logs.parent.chmod(0o700)
    make_directory(logs.parent, is_shared=False)


def test_links_of_the_user_are_followed(places: Path) -> None:
    scratch, folder = places / "scratch", places / "run"
    scratch.mkdir()
    folder.mkdir(0o700)
    (folder / "checkpoints").symlink_to(scratch)
    (folder / "bundle").symlink_to("bundle_1234")
    (places / "by_link").symlink_to("run")
    (places / "up").symlink_to("../mine/./run/../by_link")
    for path in (folder, places / "by_link", places / "up"):
        make_directory(path, is_shared=False)
    scratch.chmod(0o777)
    assert f"{scratch} is owned by" in refusal(folder)
    (places / "loop").symlink_to("loop")
    with pytest.raises(InputError, match="Too many levels of symbolic links"):
        make_directory(places / "loop" / "run", is_shared=False)


@needs_other_user
def test_links_of_another_user_are_not_followed(places: Path) -> None:
    (places / "real").mkdir(0o700)
    shared = places.parent  # noqa: F811
    as_other_user(lambda: (shared / "run").symlink_to(places / "real"))
    as_other_user(lambda: (shared / "runs").symlink_to(places))
    (places / "hop").symlink_to(shared / "runs")
    for path in (shared / "run", shared / "runs" / "new", places / "hop" / "real"):
        assert " is owned by nobody (mode lrwxrwxrwx): its owner chooses where" in refusal(path)
    assert sorted(path.name for path in places.iterdir()) == ["hop", "real"]


@needs_other_user
def test_folders_above(places: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Everyone can rename what is in it: refused. A project's folder: a warning, once."""
    places.chmod(0o777)
    assert f"chmod +t {places}" in refusal(places / "new" / "run")
    assert list(places.iterdir()) == []
    places.chmod(0o1777)
    make_directory(places / "run", is_shared=False)
    assert capfd.readouterr().err == ""

    os.chown(places, -1, OTHER.pw_gid)
    places.chmod(0o2770)
    for _ in range(2):
        make_directory(places / "run", is_shared=False)
    assert capfd.readouterr().err.count("warning") == 1
    os.chown(places, OTHER.pw_uid, -1)
    places.chmod(0o755)
    make_directory(places / "run", is_shared=False)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith(": its owner could put something else in the place of what is below it")


@needs_other_user
def test_another_user_who_makes_the_folder_between_the_check_and_the_start(places: Path, monkeypatch) -> None:
    made, folder = Path.mkdir, places.parent / "run"

    def late(path: Path, *args: object, **kwargs: object) -> None:
        if path == folder:
            as_other_user(lambda: os.mkdir(folder, 0o777))
        made(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", late)
    assert "is owned by nobody" in refusal(folder)


# Owns ./project/run, waits, and writes there.
OWNER = """
import sys
from pathlib import Path
from hpcrl.runtime import run_owner
from hpcrl.runtime.run_folder import make_directory

run = Path("project/run").absolute()
make_directory(run, is_shared=False)
run_owner.take(run, 3600)
print("owns", flush=True)
sys.stdin.readline()
run_owner.check()
(run / "metrics.jsonl").write_text("line")
"""


@needs_other_user
@pytest.mark.parametrize("by", ["link", "folder"])
def test_a_job_whose_folder_is_exchanged_ends_without_writing_there(places: Path, by: str) -> None:
    """In a project's folder, another member can put something in the place of the run, with an owner's record in it."""
    project, victim = places / "project", places / "victim"
    os.mkdir(project)
    os.chown(project, -1, OTHER.pw_gid)
    project.chmod(0o2770)
    places.chmod(0o755)
    (victim / "owner").mkdir(parents=True)
    (victim / "owner" / "00000001.json").touch()
    job = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        cwd=places,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert job.stdout is not None and job.stdout.readline() == "owns\n"

        def exchange() -> None:
            (project / "run").rename(project / "away")
            if by == "link":
                (project / "run").symlink_to(victim)
            else:
                (project / "run" / "owner").mkdir(parents=True)
                os.mkfifo(project / "run" / "owner" / "00000001.json")

        as_other_user(exchange)
        _, errors = job.communicate("\n", timeout=60)
    finally:
        job.kill()
    assert job.returncode == 2
    assert f"{project}/run was replaced by another user" in errors
    assert [path.name for path in victim.iterdir()] == ["owner"]
