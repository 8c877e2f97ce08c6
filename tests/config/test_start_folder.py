"""`hpcrl init`: folders from which a job can start, in a checkout and from a wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hpcrl.config.loader import load_config
from hpcrl.config.start_folder import KINDS, next_steps, write
from hpcrl.runtime.exits import InputError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", KINDS)
def test_templates_of_a_new_folder_load_and_no_file_is_replaced(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS[name]
    write(kind, tmp_path)
    monkeypatch.chdir(tmp_path)
    templates = list(tmp_path.rglob("grpo*.yaml"))
    assert templates and all(load_config(path).algorithm.adv_estimator == "grpo" for path in templates)
    words = [word for line in next_steps(kind, tmp_path) for word in line.split() if word.endswith(".yaml")]
    assert words and all(Path(word).exists() for word in words)
    with pytest.raises(InputError, match="exists, and init replaces no file"):
        write(kind, tmp_path)


def test_the_wheel_has_the_templates(tmp_path: Path) -> None:
    source = tmp_path / "source"
    copy = ["git", "clone", "-q", str(ROOT), str(source)]
    subprocess.run(copy, check=True, capture_output=True)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    done = subprocess.run(build, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for kind in KINDS.values():
        for place in kind.copies:
            assert any(name.startswith(f"hpcrl/templates/{place}") for name in names), place
    assert {"hpcrl/kernels/__init__.py", "hpcrl/templates/configs/machines/dgx_h100.yaml"} <= names
