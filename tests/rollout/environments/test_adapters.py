"""Environments of other packages: what the model reads and writes, and two training steps with the real package."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from hpcrl.rollout.environments.environment import Turn
from hpcrl.rollout.environments.gymnasium_environment import GymnasiumEnvironment
from tests.extra_environments import acts, python_with, rows, two_steps
from tests.mpi.lab import ROOT

gymnasium = pytest.mark.skipif(find_spec("gymnasium") is None, reason="gymnasium is not installed")
ADAPTERS = "from hpcrl.api import GymnasiumEnvironment, OpenEnvEnvironment, VerifiersEnvironment\n"
SUMS = """
import random
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Says(Action):
    text: str

class Reads(Observation):
    text: str

class Sums(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self.numbers = [random.Random(seed).randint(1, 9) for _ in range(2)]
        return Reads(text="{} + {}?".format(*self.numbers))

    def step(self, action, timeout_s=None, **_):
        right = action.text == str(sum(self.numbers))
        return Reads(text="yes" if right else "no", done=right, reward=float(right))

    @property
    def state(self):
        return State()

if __name__ == "__main__":
    import sys, uvicorn
    app = create_app(Sums, Says, Reads, max_concurrent_envs=32)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""
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
PLAYS = """
import json, sys
from hpcrl.api import OpenEnvEnvironment, Turn
for source in ("sums:Sums", sys.argv[1]):
    for field in ("text", ""):
        env = OpenEnvEnvironment(source, "sums:Says", field, field)
        question = env.reset({}, 5)[0]["content"]
        said = str(sum(int(it) for it in question if it.isdigit()))
        turns = ["x", said if field else json.dumps({"text": said})]
        print(json.dumps([question, *(env.step(Turn(turn)) for turn in turns)]))
        env.close()
"""


@gymnasium
def test_renderings_and_actions_of_gymnasium() -> None:
    env = GymnasiumEnvironment("FrozenLake-v1", "left down right up", render_mode="ansi", is_slippery=False)
    assert "[red S]FFF\nFHFH" in env.reset({}, 3)[0]["content"]
    assert "S[red F]FF" in env.step(Turn("I go Right.")).messages[0]["content"]
    assert env.step(Turn("jump")).messages[0]["content"] == "expected one of left, down, right, up"
    for way in ("right", "down", "down", "down"):
        assert not (step := env.step(Turn(way))).done
    step = env.step(Turn("right"))
    assert step.done and step.reward == step.info["acc"] == 1.0
    env.close()

    taxi = GymnasiumEnvironment("Taxi-v4", render_mode="ansi").reset({}, 3)[0]["content"]
    assert {"blue", "magenta", "yellow"} <= {word.strip("|[") for word in taxi.replace("[", " ").split()}


@gymnasium
def test_other_spaces_of_gymnasium() -> None:
    pole = GymnasiumEnvironment("CartPole-v1")
    assert len(json.loads(pole.reset({}, 3)[0]["content"])) == 4
    assert pole.step(Turn("1")).reward == 1.0
    for wrong in ("2", "up", "[1]"):
        step = pole.step(Turn(wrong))
        assert step.messages[0]["content"] == "expected JSON of Discrete(2)" and not step.done
    assert pole.step(Turn("up", is_last=True)).done
    assert GymnasiumEnvironment("Blackjack-v1").reset({}, 3)[0]["content"].startswith("[")


@gymnasium
def test_two_training_steps_of_gymnasium(tmp_path: Path) -> None:
    (tmp_path / "adapters.py").write_text(ADAPTERS)
    kwargs = {"id": "FrozenLake-v1", "actions": "l d r u", "render_mode": "ansi", "is_slippery": False}
    rollout = acts(tmp_path / "adapters.py", "GymnasiumEnvironment", **kwargs)
    found = two_steps(sys.executable, tmp_path, data=rows(tmp_path), rollout=rollout)
    assert len(found) == 2 and all(line["env/steps"] >= 8 and line["env/errors"] == 0 for line in found)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The interpreter with OpenEnv, and the address of a server; its file is sums.py in the folder."""
    python = python_with("openenv")
    (tmp_path / "sums.py").write_text(SUMS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([python, str(tmp_path / "sums.py"), str(port)])
    try:
        until = time.monotonic() + 120
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None and time.monotonic() < until, "the server did not start"
            time.sleep(0.1)
        yield python, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.exhaustive
def test_openenv_in_process_and_behind_a_server(tmp_path: Path, server: tuple[str, str]) -> None:
    python, address = server
    (tmp_path / "plays.py").write_text(PLAYS)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    command = [python, str(tmp_path / "plays.py"), address]
    played = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    found = [json.loads(line) for line in played.splitlines()]
    for (question, wrong, right), as_json in ((found[0], found[1]), (found[2], found[3])):
        assert question in as_json[0] and wrong[0][0]["content"] == "no" and wrong[1:3] == [False, 0.0]
        assert right[1:4] == [True, 1.0, {"acc": 1.0, "return": 1.0}]
        assert as_json[1][0][0]["content"].startswith("no action: ") and as_json[2][1:3] == [True, 1.0]
    (tmp_path / "adapters.py").write_text(ADAPTERS)
    kwargs = {"source": address, "action_field": "text", "text_field": "text"}
    rollout = acts(tmp_path / "adapters.py", "OpenEnvEnvironment", **kwargs)
    found = two_steps(python, tmp_path, data=rows(tmp_path), rollout=rollout)
    assert len(found) == 2 and all(line["env/steps"] >= 8 and line["env/errors"] == 0 for line in found)


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.version_info < (3, 11), reason="verifiers 0.4 needs Python 3.11")
def test_two_training_steps_of_verifiers(tmp_path: Path) -> None:
    python = python_with("verifiers")
    (tmp_path / "adapters.py").write_text(ADAPTERS)
    (tmp_path / "tasks.py").write_text(TASKSET)
    rollout = acts(tmp_path / "adapters.py", "VerifiersEnvironment", taskset="tasks", harness="null")
    rollout["multi_turn"]["environment"]["timeout"] = 200.0
    found = two_steps(python, tmp_path, data=rows(tmp_path), rollout=rollout)
    assert len(found) == 2
    for line in found:
        assert line["env/steps"] == 8 and line["env/errors"] == 0
        assert 0 < line["env/hits/mean"] == pytest.approx(line["critic/score/mean"])
