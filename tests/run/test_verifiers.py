"""A taskset and a harness of the real verifiers, which brings packages of its own: two steps of GRPO."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.run.small_run import compared, log_of, write_config
from tests.runtime.conftest import MPIEXEC, REPOSITORY, environment

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="verifiers 0.4 needs Python 3.11"),
]

# Random weights do not all miss it in the same way.
TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    number: int

class Sum(vf.Task[Data]):
    @vf.reward
    async def hits(self, trace: vf.Trace) -> float:
        return (sum(map(ord, trace.last_reply or "")) + self.data.number) % 7 / 7

class Sums(vf.Taskset[Sum]):
    def load(self):
        for number in range(4):
            yield Sum(Data(prompt=f"{number} 1", number=number), self.config.task)

__all__ = ["Sums"]
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of an environment on top of this one, with what the extra requires."""
    folder = tmp_path_factory.mktemp("verifiers")
    venv.create(folder)
    (next((folder / "lib").glob("python*")) / "site-packages" / "base.pth").write_text(sysconfig.get_path("purelib"))
    for library in Path(sys.prefix, "lib").glob("*mpi*"):  # mpi4py loads MPI from there
        (folder / "lib" / library.name).symlink_to(library)
    made = folder / "bin" / "python"
    listed = subprocess.run(
        [sys.executable, REPOSITORY / "tools" / "requirements.py", "verifiers"], capture_output=True, check=True
    )
    (folder / "requirements.txt").write_bytes(listed.stdout)
    pip = [sys.executable, "-m", "pip", "--python", made, "install", "-q"]
    done = subprocess.run([*pip, "-r", folder / "requirements.txt"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"verifiers cannot be installed: {done.stderr.strip()[-300:]}")
    return made


def test_two_steps(tmp_path: Path, python: Path) -> None:
    (tmp_path / "sums.py").write_text(TASKSET)
    (tmp_path / "environment.py").write_text("from hpcrl.api import VerifiersEnvironment")
    rows = [{"prompt": [{"role": "user", "content": "1"}], "extra_info": {"index": index}} for index in range(4)]
    kwargs = {"taskset": "sums", "harness": "null"}
    chosen = {
        "path": str(tmp_path / "environment.py"),
        "name": "VerifiersEnvironment",
        "kwargs": kwargs,
        "timeout": 200.0,
    }
    config = write_config(
        tmp_path,
        rollout={"n": 2, "multi_turn": {"enable": True, "environment": chosen}},
        data={"train_files": [str(tmp_path / "rows.jsonl")], "train_batch_size": 2, "max_prompt_length": 16}
        | {"max_response_length": 8},
        actor={"ppo_mini_batch_size": 2},
        trainer={"total_training_steps": 2},
    )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    here = environment(PYTHONPATH=f"{REPOSITORY}:{tmp_path}", PATH=f"{python.parent}:{os.environ['PATH']}")
    command = [MPIEXEC, "-n", "1", python, "-m", "hpcrl", "train", config]
    done = subprocess.run(command, cwd=tmp_path, env=here, stdin=subprocess.DEVNULL, timeout=800)
    assert done.returncode == 0, log_of(tmp_path)
    steps = compared(tmp_path)
    assert len(steps) == 2
    for line in steps:
        assert line["env/steps"] == 4 and line["env/errors"] == 0
        assert 0 < line["env/hits/mean"] == pytest.approx(line["critic/score/mean"])
