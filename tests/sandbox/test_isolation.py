"""The files that programs under test see, for interpreters in and beside a project's folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zlib
from pathlib import Path

import pytest

from hpcrl.sandbox import isolation

REPOSITORY = Path(__file__).parents[2]
LOOK = """
import json, sys
from hpcrl.sandbox.program import run_python
print(json.dumps(run_python(sys.argv[1])._asdict()))
"""


def run(python: Path | str, source: str, **environment: str) -> str:
    """What a program prints in the sandbox of an interpreter."""
    given = os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment
    done = subprocess.run([str(python), "-c", LOOK, source], capture_output=True, text=True, env=given)
    assert done.returncode == 0, done.stderr
    ran = json.loads(done.stdout)
    assert ran["fate"] == "ok", ran
    return ran["stdout"]


TREE = """
import os
for folder, _, files in os.walk({root!r}):
    for name in files:
        if "/site-packages/" not in folder and "/lib/python" not in folder:
            print(os.path.relpath(os.path.join(folder, name), {root!r}))
"""


@pytest.mark.usefixtures("isolated")
def test_of_a_project_that_is_a_virtual_environment_only_python_is_seen(tmp_path: Path) -> None:
    project = tmp_path / "my project"
    venv.create(project, symlinks=True)
    (packages,) = project.glob("lib/python*/site-packages")
    (packages / "helper.py").write_text("VALUE = 7\n")
    for private in ("answers.json", "data/val.parquet", "lib/answers.json", "share/answers.json", "bin/answers.sh"):
        (project / private).parent.mkdir(exist_ok=True)
        (project / private).write_text("42")
    again = "import subprocess, sys, helper; print(helper.VALUE, flush=True)\n"
    again += "subprocess.run([sys.executable, '-c', 'import helper, ssl; print(helper.VALUE + 1)'])\n"
    seen = run(project / "bin" / "python", again + TREE.format(root=str(project))).split()
    assert seen[:2] == ["7", "8"]
    assert set(seen[2:]) == {"bin/python", "pyvenv.cfg"}


@pytest.mark.usefixtures("isolated")
def test_of_a_folder_of_libraries_only_those_that_python_loads_are_seen(tmp_path: Path) -> None:
    """All of it if it has nothing else: libraries may load others later."""
    with open("/proc/self/maps") as maps:
        loaded = {line.split(None, 5)[5].strip() for line in maps if "/libz.so" in line}
    if not loaded or "site-packages" in (library := loaded.pop()):
        pytest.skip(f"{zlib} has no library of its own")
    (tmp_path / "mixed" / "answers").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    for private in ("mixed/answers.json", "mixed/answers/val.so", "mixed/other.so", "data/answers.json"):
        (tmp_path / private).write_text("42")
    shutil.copy(library, tmp_path / "mixed" / "libz.so.1.9")
    (tmp_path / "mixed" / "libz.so.1").symlink_to("libz.so.1.9")
    (tmp_path / "link").symlink_to("mixed")
    folders = f"{tmp_path}/data:{tmp_path}/link:relative:"
    seen = run(sys.executable, "import zlib\n" + TREE.format(root=str(tmp_path)), LD_LIBRARY_PATH=folders).split()
    assert set(seen) == {"link/libz.so.1", "link/libz.so.1.9", "mixed/libz.so.1", "mixed/libz.so.1.9"}
    for other in ("answers.json", "answers"):
        path = tmp_path / "mixed" / other
        path.unlink() if path.is_file() else shutil.rmtree(path)
    seen = run(sys.executable, TREE.format(root=str(tmp_path / "mixed")), LD_LIBRARY_PATH=folders).split()
    assert set(seen) == {"libz.so.1", "libz.so.1.9", "other.so"}


def test_of_a_conda_environment_the_libraries_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its packages find theirs in one folder."""
    for folder in ("bin", "lib", "conda-meta", "data"):
        (tmp_path / folder).mkdir()
    (tmp_path / "bin" / "python").touch()
    (tmp_path / "lib" / "libmkl_avx2.so.2").touch()
    for name in ("prefix", "base_prefix"):
        monkeypatch.setattr(sys, name, str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setattr(isolation, "loaded_libraries", lambda packages: [])
    shown = [path for path in isolation.visible_paths([]) if path.startswith(str(tmp_path))]
    assert sorted(shown) == [f"{tmp_path}/bin/python", f"{tmp_path}/lib"]


@pytest.mark.usefixtures("isolated")
def test_the_systems_python_needs_no_more_than_the_system(tmp_path: Path) -> None:
    python = "/usr/bin/python3"
    if not os.path.exists(python):
        pytest.skip(f"{python} is not installed")
    (tmp_path / "answers.json").touch()
    source = f"import os, ssl, sqlite3; print(sorted(os.listdir('/')), os.path.exists({str(tmp_path)!r}))"
    seen = run(python, source, LD_LIBRARY_PATH=str(tmp_path))
    assert "'home'" not in seen and "'root'" not in seen and "'usr'" in seen and seen.endswith("False\n")
