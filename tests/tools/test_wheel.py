"""The wheel and the sdist: what they hold, and that jobs can be submitted from an installed wheel."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import hpcrl
from hpcrl.config.paths import TEMPLATES
from tests.runtime.conftest import environment

ROOT = Path(__file__).parents[2]
COPIED = ("hpcrl", "kernels", "configs", "slurm", "docs", "tools")
BUILD = "import setuptools.build_meta as build; print(build.build_wheel('dist')); print(build.build_sdist('dist'))"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because setuptools leaves folders beside the source."""
    source = tmp_path_factory.mktemp("source")
    for name in COPIED:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-c", BUILD], cwd=source, check=True, capture_output=True)
    return source / "dist"


def test_the_wheel_has_the_templates_and_says_whose_it_is(dist: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        metadata = wheel.read(next(name for name in names if name.endswith("METADATA"))).decode()
    folders = ("configs", "slurm", "docs/examples")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    expected = {f"hpcrl/templates/{path.relative_to(ROOT)}" for path in paths if path.is_file()}
    assert {*expected, "hpcrl/templates/tools/prepare_countdown.py"} == {n for n in names if n.startswith("hpcrl/temp")}
    assert {"hpcrl/kernels/sampling.py", "hpcrl/observe/report/assets/main.js"} <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"hpcrl"}
    assert "Author: hpcrl developers\n" in metadata and "Classifier: Operating System :: POSIX :: Linux\n" in metadata


def test_the_sdist_has_what_the_wheel_is_built_from(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"setup.py", "hpcrl/kernels/sampling.py", "configs/start/reward.py", "slurm/common.sh"} <= names
    assert {"docs/examples/grpo_by_hand.py", "tools/prepare_countdown.py"} <= names


def test_a_job_is_submitted_from_an_installed_wheel(dist: Path, tmp_path: Path) -> None:
    packages, work = tmp_path / "site-packages", tmp_path / "work"
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        wheel.extractall(packages)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho 41\n")
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    environ = environment(PYTHONPATH=str(packages), PATH=f"{tmp_path / 'bin'}:/usr/bin:/bin")

    def run(*arguments: str, cwd: Path = tmp_path) -> str:
        done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-m", "hpcrl", "--version") == f"hpcrl {hpcrl.__version__}\n"
    run("-m", "hpcrl", "init", "work", "--laptop")
    run("prepare_countdown.py", "--files", "train", "val", "--sft-rows", "8", cwd=work)
    run("-m", "hpcrl", "submit", "grpo.yaml", "model.init_from=null", cwd=work)
    code = work / "runs" / "grpo" / "bundle" / "code"
    common = (code / "slurm" / "common.sh").read_text(encoding="utf-8")
    assert common == (TEMPLATES / "slurm" / "common.sh").read_text(encoding="utf-8")
    assert (code / "hpcrl" / "kernels" / "sampling.py").is_file() and not (code / "hpcrl-0.1.0.dist-info").exists()
