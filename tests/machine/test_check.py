"""`hpcrl check` on healthy ranks, on ranks that are no world, and beside broken packages."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcrl.machine import check
from hpcrl.sandbox.isolation import Isolation
from tests.preloaded import RANK

MPIEXEC = Path(sys.executable).with_name("mpiexec")


def test_one_table_for_all_ranks(run: Callable) -> None:
    ended = run(MPIEXEC, "-n", "2", *RANK, "-m", "hpcrl", "check")
    assert ended.code == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("megatron-core") == 1 and "2 in one world on 1 node(s)" in ended.stdout
    assert ended.stdout.count("  code sandbox  ") == 1
    assert re.search(r"\nready\nnext: hpcrl init first --(laptop|slurm|one-gpu)[^\n]*\n$", ended.stdout)


@pytest.mark.parametrize(
    ("gib", "has_slurm", "said"),
    [
        ([], False, "hpcrl init first --laptop"),
        ([], True, "hpcrl init first --slurm, "),
        ([80, 80], False, "hpcrl init first --slurm, "),
        ([8], False, "--one-gpu, then hpcrl plan configs/one_gpu/grpo_0_5b.yaml job.gpu_memory_gib=7.4"),
        ([23.6], False, "--one-gpu, then hpcrl train configs/one_gpu/grpo_1_5b_lora.yaml, which fits 24 GiB"),
        ([44.4], False, "--one-gpu, then hpcrl train configs/one_gpu/grpo_3b_lora.yaml, which fits 44 GiB"),
        ([79.2], False, "--one-gpu, then hpcrl train configs/one_gpu/grpo_1_5b.yaml, which fits 79 GiB"),
    ],
)
def test_the_last_line_is_the_command_to_try_next(gib: list[float], has_slurm: bool, said: str) -> None:
    assert said in check.next_command([int(each * check.GIB) for each in gib], has_slurm=has_slurm)


def test_ranks_that_are_no_world_are_wrong(run: Callable) -> None:
    ended = run(sys.executable, "-m", "hpcrl", "check", PMI_SIZE="4", PMI_RANK="0")
    assert ended.code == 1 and "wrong: MPI: 4 ranks were started (PMI_SIZE=4)" in ended.stdout


def install_transformer_engine(folder: Path, code: str) -> None:
    (folder / "transformer_engine" / "pytorch").mkdir(parents=True)
    (folder / "transformer_engine" / "__init__.py").write_text(code)
    (folder / "transformer_engine" / "pytorch" / "__init__.py").touch()
    (folder / "transformer_engine" / "pytorch" / "optimizers.py").write_text("class FusedAdam: ...\n")
    (folder / "transformer_engine-2.20.2.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: transformer_engine\nVersion: 2.20.2\n"
    (folder / "transformer_engine-2.20.2.dist-info" / "METADATA").write_text(metadata)


WITHOUT_A_GPU = """
from hpcrl.machine import check
findings = check.torch(), check.megatron_core(), check.transformer_engine()
assert [finding.wrong for finding in findings] == [None] * 3, findings
assert findings[2].found == "2.20.2 (used on GPUs, for fp8)"
import torch
from megatron.core.optimizer import Adam, distrib_optimizer
assert Adam is torch.optim.AdamW and not distrib_optimizer.USING_TE_OPTIMIZER
"""


@pytest.mark.skipif("torch" in sys.modules and sys.modules["torch"].cuda.is_available(), reason="of a CPU")
def test_transformer_engine_is_not_imported_without_a_gpu(run: Callable, tmp_path: Path) -> None:
    """Its module imports what import_megatron keeps out, and its optimizers need CUDA."""
    install_transformer_engine(tmp_path, "import torch.distributed.tensor, torch.distributed._tensor\n")
    ended = run(sys.executable, "-c", WITHOUT_A_GPU)  # Python looks into the working folder first
    assert ended.code == 0, ended.stdout + ended.stderr


def test_half_installed_transformer_engine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_transformer_engine(tmp_path, 'raise FileNotFoundError("libtransformer_engine.so")\n')
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(check, "_on_gpu", lambda: True)
    finding = check.transformer_engine()
    assert finding.found == "2.20.2, half-installed"
    assert "it is installed but cannot be imported" in (finding.wrong or "")

    def import_megatron(name: str) -> None:
        raise FileNotFoundError("libtransformer_engine.so")

    monkeypatch.setattr(check, "_as_a_job_does", import_megatron)
    assert "because Transformer Engine is half-installed" in (check.megatron_core().wrong or "")


@pytest.mark.parametrize(("driver", "amd", "extra"), [(None, 0, "cpu"), ((13, 0), 0, "gpu"), (None, 8, "gpu")])
def test_missing_packages_name_their_extra(monkeypatch: pytest.MonkeyPatch, driver: Any, amd: int, extra: str) -> None:
    installed = check.version_of
    monkeypatch.setattr(check, "version_of", lambda name: None if name in ("torch", "mpi4py") else installed(name))
    monkeypatch.setattr(check.gpus, "driver_cuda_version", lambda: driver)
    monkeypatch.setattr(check.gpus, "amd_devices", lambda: amd)
    finding = check.requirements()
    assert finding.wrong is not None and finding.needed and "cpu" not in finding.found.split("extras: ")[1]
    assert "not installed: torch, mpi4py" in finding.wrong and f"`pip install 'hpcrl[{extra}]'`" in finding.wrong
    advice = check.package("mpi4py", needed=True).wrong or ""
    assert f"hpcrl[{extra}]" in advice and ("ROCm" in advice) == bool(amd)


@pytest.mark.parametrize(("folder", "right"), [("normalization", True), ("lib", False)])
def test_the_other_apex_is_told_from_nvidias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, right: bool
) -> None:
    (tmp_path / "apex" / folder).mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = check.apex()
    assert (finding.wrong is None) == right
    assert right or "pip uninstall apex" in (finding.wrong or "")


def test_a_kernel_without_namespaces_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def finding(*isolation: Any) -> check.Finding:
        monkeypatch.setattr(check, "probe_isolation", lambda: Isolation(*isolation))
        found = check.sandbox()
        assert not found.needed or found.wrong is None
        return found

    all_holds = finding(True, ["/usr"], True)
    assert all_holds.wrong is None and "no network" in all_holds.found and "none of your files" in all_holds.found
    calls_open = finding(True, ["/usr"], False, "seccomp: Function not implemented")
    assert "none of your files" in calls_open.found and "keys" not in calls_open.found
    assert "keys" in (calls_open.wrong or "") and "seccomp: Function not implemented" in (calls_open.wrong or "")
    files_open = finding(True, [], False, "mount: Operation not permitted")
    assert "no network" in files_open.found and "files" not in files_open.found
    assert "can read and write your files" in (files_open.wrong or "")
    assert "mount: Operation not permitted" in (files_open.wrong or "")
    all_open = finding(False, [], False, "unshare: Operation not permitted")
    assert all_open.found.endswith("only") and "can use the network" in (all_open.wrong or "")


def test_a_note_does_not_fail_but_a_need_does(capsys: pytest.CaptureFixture[str]) -> None:
    fine, note = check.Finding("a", "1"), check.Finding("b", "2", "slow", needed=False)
    assert check.report([fine, note]) == 0
    assert check.report([fine, note, check.Finding("c", "3", "missing")]) == 1
    assert "1 thing to fix" in capsys.readouterr().out
