"""The collective import of tensorrt_llm: which MPI may, and what a job says where it cannot."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl.rollout.engines.tensorrt_llm import declaration
from hpcrl.runtime.exits import InputError
from tests.preloaded import RANK

REPOSITORY = Path(__file__).parents[2]
MPIEXEC = Path(sys.executable).with_name("mpiexec")
OPEN_MPI = "Open MPI v5.0.6, package: Open MPI root@host Distribution, ident: 5.0.6"

JOB = """
from types import SimpleNamespace
from hpcrl.rollout.engines.tensorrt_llm.declaration import TensorRTLLM
from hpcrl.runtime.job import run_spmd
watchdog = SimpleNamespace(enable=False)
torch = dict(c10d_backend="gloo", nccl_timeout=60, cpu_bind=True, memory_snapshot=False, full_determinism=False)
owned = dict(owner_heartbeat_seconds=10.0, group_readable=False)
run = SimpleNamespace(dir="runs", name="small", watchdog=watchdog, **owned, **torch)
run_spmd(lambda: SimpleNamespace(run=run, engine=TensorRTLLM()), lambda world, config: 0)
"""


def test_open_mpi_with_threads_alone_will_do() -> None:
    assert declaration.unsupported_mpi(OPEN_MPI, thread_multiple=True) is None
    assert "MPI_THREAD_MULTIPLE" in (declaration.unsupported_mpi(OPEN_MPI, thread_multiple=False) or "")
    for library in ("MPICH Version:      5.0.2\nMPICH Release date: ...", "Intel(R) MPI Library 2021.13"):
        assert "TensorRT-LLM needs Open MPI, and mpi4py found" in (declaration.unsupported_mpi(library, True) or "")


def test_a_job_under_mpich_ends_in_one_line_before_anything_hangs(run: Callable, tmp_path: Path) -> None:
    package = tmp_path / "tensorrt_llm"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('it was imported')\n")
    (tmp_path / "job.py").write_text(JOB)
    ended = run(MPIEXEC, "-n", "2", *RANK, "job.py")
    assert ended.code == 2, ended.stdout + ended.stderr
    assert ended.stderr.count("hpcrl: error: TensorRT-LLM needs Open MPI, and mpi4py found MPICH") == 1
    assert "rollout.engine=native" in ended.stderr and "it was imported" not in ended.stderr + ended.stdout


LOST = """
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    raise OSError("libcuda.so.1: cannot open")
MPI.COMM_WORLD.Split(0)
"""


@pytest.mark.parametrize("program", ["job", "check"])
def test_an_import_that_fails_on_one_rank_ends_the_job(run: Callable, tmp_path: Path, program: str) -> None:
    (tmp_path / "tensorrt_llm.py").write_text(LOST)
    text = {"job": JOB, "check": "from hpcrl.cli import main\nmain(['check', '--trtllm'])\n"}[program]
    (tmp_path / "program.py").write_text(
        "from hpcrl.rollout.engines.tensorrt_llm import declaration\ndeclaration.unsupported_mpi = lambda *_: None\n"
        + text
    )
    ended = run(MPIEXEC, "-n", "3", *RANK, "program.py")
    assert ended.code == 2, ended.stdout + ended.stderr
    assert ended.stderr.count("hpcrl: error: tensorrt_llm cannot be imported: OSError: libcuda.so.1") == 1
    assert "Traceback" not in ended.stderr


A_CHECK = """
import sys
from tools.gpu import check
from tools.gpu.outcome import require
def weights(world):
    require(world.rank != 1, "weights differ")
    return "as expected"
check.usable = lambda world: ""
sys.modules["a_check"] = sys.modules["__main__"]
check.main("a_check", "weights")
"""


def test_a_gpu_check_does_not_pass_where_one_rank_fails(run: Callable, tmp_path: Path) -> None:
    (tmp_path / "check.py").write_text(A_CHECK)
    alone = run(MPIEXEC, "-n", "1", *RANK, "check.py")
    assert alone.code == 0 and alone.stdout == "pass: as expected\n"
    ended = run(MPIEXEC, "-n", "2", *RANK, "check.py")
    assert ended.code == 1, ended.stdout + ended.stderr
    assert ended.stdout == "fail: weights differ\n"


CLOSING = """
from mpi4py import MPI
from types import SimpleNamespace
from hpcrl.rollout.engines.tensorrt_llm.declaration import TensorRTLLM
from hpcrl.runtime.job import run_spmd
from hpcrl.runtime.world import before_mpi_finalize
def main(world, config):
    for name in ("first", "last"):
        before_mpi_finalize(lambda name=name: open(f"ended_{world.rank}", "a").write(f"{name} {MPI.Is_finalized()}\\n"))
    return 0
watchdog = SimpleNamespace(enable=False)
torch = dict(c10d_backend="gloo", nccl_timeout=60, cpu_bind=True, memory_snapshot=False, full_determinism=False)
owned = dict(owner_heartbeat_seconds=10.0, group_readable=False)
run = SimpleNamespace(dir="runs", name="small", watchdog=watchdog, **owned, **torch)
run_spmd(lambda: SimpleNamespace(run=run), main)
"""


def test_threads_that_use_mpi_are_ended_before_mpi_is(run: Callable, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(CLOSING)
    ended = run(MPIEXEC, "-n", "2", *RANK, "job.py")
    assert ended.code == 0, ended.stdout + ended.stderr
    for rank in (0, 1):
        assert (tmp_path / f"ended_{rank}").read_text() == "last False\nfirst False\n"


def test_the_check_says_why_not(run: Callable) -> None:
    ended = run(MPIEXEC, "-n", "2", *RANK, "-m", "hpcrl", "check", "--trtllm")
    assert ended.code == 1, ended.stdout + ended.stderr
    assert ended.stdout.count("wrong: TensorRT-LLM: TensorRT-LLM needs Open MPI") == 1
    assert "before TensorRT-LLM can run" in ended.stdout


def test_an_import_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tensorrt_llm.py").write_text("raise OSError('libcuda.so.1: cannot open\\nshared object file')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tensorrt_llm", raising=False)
    with pytest.raises(InputError, match="cannot be imported: OSError: libcuda.so.1: cannot open shared") as caught:
        declaration.load()
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(declaration, "PACKAGE", "no_such_package")
    assert "not installed" in (declaration.missing_package() or "")


def test_only_the_adapter_imports_the_package() -> None:
    for path in (REPOSITORY / "hpcrl").rglob("*.py"):
        if path.parent == REPOSITORY / "hpcrl" / "rollout" / "engines" / "tensorrt_llm":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "tensorrt_llm" for name in names), f"{path}:{node.lineno}"  # type: ignore[attr-defined]
