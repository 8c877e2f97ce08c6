"""Old names of modules: hpcrl/moved.py."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hpcrl import moved

PACKAGE = Path(moved.__file__).parent
# of each old folder a module, and its name today
NEW_NAMES = {
    "grid.layout": "runtime.layout",
    "reshard.planner": "engine.refit.planner",
    "checkpoint.manifest": "engine.checkpoint.manifest",
    "tracing.rank_trace": "observe.trace.rank_trace",
    "report.charts": "observe.report.charts",
    "viewer.samples_view": "observe.report.samples_view",
    "telemetry.runlog": "observe.read.runlog",
    "telemetry.seeds": "observe.record",  # joined with another
    "plan.memory": "forecast.memory.memory",
    "predict.cost": "forecast.time.cost",
    "rollout_source.streaming": "run.rollouts.streaming",
    "rollout.native.engine": "rollout.engines.native.engine",  # of the engines' files of this name
    "rollout.tensorrt_llm.engine": "rollout.engines.tensorrt_llm.engine",
    "rollout.agent.loop": "rollout.environments.loop",
    "model.hf.files": "model",
    "data.sources.gsm8k": "data",
}


def path_of(module: str) -> Path:
    return PACKAGE / module.replace(".", "/")


def test_every_new_name_exists_and_no_old_one() -> None:
    assert [new for new in moved.KEPT.values() if not path_of(new).with_suffix(".py").is_file()] == []
    assert [new for new in moved.FOLDERS.values() if not (path_of(new) / "__init__.py").is_file()] == []
    assert [old for old in moved.FOLDERS if (path_of(old) / "__init__.py").exists()] == []
    assert {old.rpartition(".")[0] for old in NEW_NAMES} == set(moved.FOLDERS)


@pytest.mark.parametrize("old", NEW_NAMES)
def test_an_old_name_says_the_new_one(old: str) -> None:
    with pytest.raises(ImportError, match=rf"^hpcrl\.{old} is now (in )?hpcrl\.{NEW_NAMES[old]}$"):
        importlib.import_module(f"hpcrl.{old}")


@pytest.mark.parametrize("old", moved.KEPT)
def test_names_in_files_of_users_still_work(old: str) -> None:
    spec = find_spec(f"hpcrl.{old}")
    assert spec is not None and spec.loader is not None


def test_a_module_with_two_names_is_one_module() -> None:
    module = importlib.import_module("hpcrl.rollout.agent.tools")
    assert module is importlib.import_module("hpcrl.rollout.environments.tools")


def test_a_pickled_object_of_an_old_name_says_the_new_one() -> None:
    assert pickle.loads(b"chpcrl.rollout.agent.tools\ntool\n.").__module__ == "hpcrl.rollout.environments.tools"
    with pytest.raises(ImportError, match="is now hpcrl.observe.read.runlog"):
        pickle.loads(b"chpcrl.telemetry.runlog\nRunLog\n.")


def test_an_old_program_runs() -> None:
    command = [sys.executable, "-m", "hpcrl.telemetry.summary", "--help"]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.stdout.startswith("usage: hpcrl report"), done.stderr


@pytest.mark.parametrize("name", ["hpcrl.never", "hpcrl.runtime.never"])
def test_a_name_that_never_existed_is_not_found(name: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)
    assert find_spec(name) is None


def test_python_starts_without_further_modules() -> None:
    """Programs under test wait for what `import hpcrl` imports."""
    look = f"import os, sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); seen = set(sys.modules); import hpcrl.moved; "
    command = [sys.executable, "-I", "-S", "-c", f"{look}print(*set(sys.modules) - seen)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"__future__", "hpcrl", "hpcrl.moved"}
