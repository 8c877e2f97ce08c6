"""Environments: rewards on their turns, equal trajectories whatever runs beside them, and failures that cost a sample.

The model is scripted; environments run in their real processes.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.algorithms.metrics import finish
from hpcrl.config.schema import DataConfig, MultiTurnConfig
from hpcrl.rollout.environments.environment import Turn
from hpcrl.rollout.environments.environment_worker import EnvironmentSource
from hpcrl.rollout.environments.loop import AgentLoop
from hpcrl.rollout.protocol import Request, SamplingParams, Trajectory
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox.forked_children import FIRST, ChildLimits
from hpcrl.sandbox.process_pool import ProcessPool
from hpcrl.sandbox.process_tree import descendants_of
from tests.rollout.environments.scripted import ScriptedEngine

ENVIRONMENTS = """
import enum, os, subprocess, sys, time
from hpcrl.api import Environment, Step, tool

class Counter(Environment):
    "Says how often it was asked; the third turn is the last."
    def __init__(self, start: int = 0):
        self.count = start

    def reset(self, record, seed):
        self.seed = seed
        return [{"role": "user", "content": "go on!"}]

    def step(self, turn):
        self.count += 1
        done = self.count == 3
        info = {"count": self.count, "seed": self.seed}
        return Step([{"role": "user", "content": str(self.count)}], done, self.count / 2, info)

class Forgetful(Environment):
    "Begins a new conversation after the second turn, with a turn of the model's in its prompt."
    count = 0

    def reset(self, record, seed):
        return [{"role": "user", "content": "go on!"}]

    def step(self, turn):
        self.count += 1
        if self.count == 2:
            messages = [{"role": "user", "content": "sum"}, {"role": "assistant", "content": turn.text}]
            return Step(messages, new_conversation=True)
        return Step([{"role": "user", "content": str(self.count)}], done=self.count == 4, reward=self.count / 2)

class Hostile(Counter):
    def reset(self, record, seed):
        self.how = record["prompt"][0]["content"]
        if self.how == "reset":
            raise KeyError("nothing here")
        if self.how == "reset hangs":
            time.sleep(600)
        if self.how == "reset returns a number":
            return 7
        return super().reset(record, seed)

    def step(self, turn):
        how = self.how
        if how == "raise":
            raise ValueError("a bad move")
        if how == "exit":
            os._exit(3)
        if how == "kill":
            os.kill(os.getpid(), 9)
        if how == "hang":
            time.sleep(600)
        if how == "types":
            return ["not a step"]
        if how == "nan":
            return Step(done=True, reward=float("nan"))
        if how == "memory":
            kept = [bytearray(1 << 20) for _ in range(2048)]
        if how == "fork":
            while True:
                subprocess.Popen(["sleep", "600"])
        if how == "file":
            with open(os.environ["TMPDIR"] + "/big", "wb") as file:
                while True:
                    file.write(bytes(1 << 20))
        if how == "children with memory":
            code = "import time; x = b'x' * (200 << 20); time.sleep(600)"
            [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
            time.sleep(600)
        if how == "endless":
            return Step([{"role": "user", "content": "on"}])
        if how == "floods":
            return Step([{"role": "user", "content": "x" * (1 << 20)}] * 100)
        if how == "daemon":
            subprocess.Popen(["setsid", "sleep", "600"])
        if how == "print":
            print("x" * 20_000_000)
        return super().step(turn)

class Role(str, enum.Enum):
    USER = "user"

class Polite(Environment):
    "Values of classes that the rank does not have, and a role after which the template raises."
    def reset(self, record, seed):
        self.name = record["prompt"][0]["content"]
        return [{"role": Role.USER, "content": type("Text", (str,), {})("hi")}]

    def step(self, turn):
        if self.name == "system":
            return Step([{"role": "system", "content": "be good"}])
        return Step(done=True, reward=1.0, info={"note": type("Text", (str,), {})("ok")})

class Absent(Environment):
    @classmethod
    def check(cls):
        raise RuntimeError("no such site")

class Lamp(Environment):
    "A room with a lamp."
    on = False

    @tool
    def switch(self, times: int = 1) -> str:
        "Presses the switch.\\n\\nArgs:\\n    times: how often"
        for _ in range(times):
            self.on = not self.on
        return "on" if self.on else "off"
"""
LARGE = """
from hpcrl.api import Environment, Step

class Large(Environment):
    def reset(self, record, seed):
        return [{"role": "user", "content": record["extra_info"]}]

    def step(self, turn):
        return Step([{"role": "user", "content": turn.text}], info={str(n): turn.text for n in range(64)})
"""
HOSTILE = {
    "reset": "errors",
    "raise": "errors",
    "exit": "crashes",
    "kill": "crashes",
    "hang": "timeouts",
    "types": "errors",
    "nan": "errors",
    "memory": "errors",
    "fork": "crashes",
    "file": "errors",
}
HARMLESS = ("daemon", "print", "plain")


@pytest.fixture
def make(tmp_path: Path, tokenizer: Any) -> Iterator[Callable[..., AgentLoop]]:
    (tmp_path / "environments.py").write_text(ENVIRONMENTS)
    made: list[AgentLoop] = []

    def make(
        name: str,
        max_open: int = 64,
        data: DataConfig | None = None,
        calls: int = 1,
        template_history: bool = False,
        **keys: Any,
    ) -> AgentLoop:
        environment = {"path": str(tmp_path / "environments.py"), "name": name, **keys}
        turns = {"enable": True, "max_parallel_calls": calls, "template_history": template_history}
        cfg = MultiTurnConfig.model_validate(turns | {"environment": environment})
        made.append(AgentLoop(cfg, data or DataConfig(), tokenizer, max_open=max_open))
        return made[-1]

    yield make
    for loop in made:
        loop.close()


def run(
    loop: AgentLoop, tokenizer: Any, prompts: list[str], says: Callable[[Request], str], longest: int = 64
) -> tuple[list[Trajectory], dict[str, Any]]:
    def turn(request: Request) -> np.ndarray:
        return np.array(
            [*tokenizer(says(request), add_special_tokens=False)["input_ids"], tokenizer.eos_token_id], np.int32
        )

    requests = [Request(tokenizer(it)["input_ids"], f"file:{row}:0", 0) for row, it in enumerate(prompts)]
    records = [{"prompt": [{"role": "user", "content": it}], "extra_info": {}} for it in prompts]
    sampling = SamplingParams(longest, eos_token_ids=(tokenizer.eos_token_id,))
    found, metrics = loop.run(ScriptedEngine(turn), requests, records, sampling, seed=1, step=1)  # type: ignore[arg-type]
    return found, finish(metrics)


def test_rewards_are_on_the_last_tokens_of_turns(make: Callable[..., AgentLoop], tokenizer: Any) -> None:
    found, metrics = run(make("Counter"), tokenizer, ["ab", "cd"], lambda request: "xy")
    for one, prompt in zip(found, ("ab", "cd"), strict=True):
        assert tokenizer.decode(one.prompt_ids) == f"<|bos|>{prompt}go on!"
        ends = np.flatnonzero((one.token_ids == tokenizer.eos_token_id) & (one.mask == 1))
        assert len(ends) == one.num_turns == 3
        assert one.rewards is not None and one.rewards[ends].tolist() == [0.5, 1.0, 1.5]
        assert one.rewards.sum() == 3.0 and one.finish_reason == "stop"
        assert one.info is not None and one.info["count"] == 3.0
    assert found[0].info["seed"] != found[1].info["seed"]  # type: ignore[index]
    assert metrics["env/steps"] == 6 and metrics["env/reward_per_turn/mean"] == 1.0
    assert metrics["env/count/mean"] == 3.0 and metrics["perf/environment_wait_s"] > 0


def test_few_open_environments_change_nothing(make: Callable[..., AgentLoop], tokenizer: Any) -> None:
    """One object for each trajectory, of which it keeps the state, whatever runs beside it."""
    prompts = [f"{number}a" for number in range(9)]
    few, _ = run(make("Counter", 2), tokenizer, prompts, lambda request: "xy")
    many, _ = run(make("Counter"), tokenizer, prompts, lambda request: "xy")
    assert [one.token_ids.tolist() for one in few] == [one.token_ids.tolist() for one in many]
    assert [one.info for one in few] == [one.info for one in many]


def test_values_and_roles_of_an_environment(make: Callable[..., AgentLoop], tokenizer: Any) -> None:
    template = (
        "{% for message in messages %}{% if message['role'] == 'system' and not loop.first %}"
        "{{ raise_exception('system comes first') }}{% endif %}{{ message['content'] }}"
        "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    loop = make("Polite", data=DataConfig(chat_template=template))
    (good, bad), metrics = run(loop, tokenizer, ["user", "system"], lambda request: "xy")
    assert good.finish_reason == "stop" and good.info == {"note": "ok"} and type(good.info["note"]) is str
    assert bad.finish_reason == "error" and metrics["env/errors"] == 1


def test_methods_are_tools(make: Callable[..., AgentLoop], tokenizer: Any) -> None:
    calls = [
        '<tool_call>{"name": "switch", "arguments": {"times": 3}}</tool_call>',
        '<tool_call>{"name": "switch"}</tool_call>',
        "off",
    ]

    def says(request: Request) -> str:
        return calls[tokenizer.decode(request.prefix_ids).count("</tool_call>")]

    (one,), _ = run(make("Lamp"), tokenizer, ["ab"], says)
    text = tokenizer.decode(one.token_ids)
    assert one.num_tool_calls == 2 and text.index("on") < text.index("off")

    def says_both(request: Request) -> str:
        return "off" if len(request.prefix_ids) else calls[0] + calls[1]

    (one,), _ = run(make("Lamp", calls=2), tokenizer, ["ab"], says_both, 160)
    text = tokenizer.decode(one.token_ids)
    assert (one.num_turns, one.num_tool_calls) == (2, 2) and text.index("<tool_response>on") < text.index("off")


def test_a_failure_costs_its_sample_only(make: Callable[..., AgentLoop], tokenizer: Any, caplog: Any) -> None:
    """Each kind of it beside others; no process is left of any."""
    loop = make("Hostile", timeout=15.0, memory_limit_mb=512, max_processes=16, max_file_mb=8)
    pool: Any = loop._pool
    prompts = [*HOSTILE, *HARMLESS] * 2
    found, metrics = run(loop, tokenizer, prompts, lambda request: "xy")
    for prompt, one in zip(prompts, found, strict=True):
        if prompt in HOSTILE:
            assert one.finish_reason == "error", prompt
            assert not one.mask.any() and one.rewards is None and len(one.token_ids)
            assert one.info is not None and one.info["error"].startswith(HOSTILE[prompt])
        else:
            assert one.finish_reason == "stop" and one.num_turns == 3, prompt
    for fate in ("errors", "crashes", "timeouts"):
        assert metrics[f"env/{fate}"] == 2 * list(HOSTILE.values()).count(fate), fate
    deadline = time.monotonic() + 30
    while len(descendants_of(pool._workers[0].pid)) > 1:  # the process that forks
        assert time.monotonic() < deadline, [
            os.readlink(f"/proc/{it}/exe") for it in descendants_of(pool._workers[0].pid)
        ]
        pool.pump()
        time.sleep(0.05)
    again, _ = run(loop, tokenizer, ["plain"], lambda request: "xy")
    assert again[0].num_turns == 3


def test_large_messages_in_both_directions(tmp_path: Path) -> None:
    """More than the pipes' buffers hold, in requests and answers at the same time."""
    (tmp_path / "large.py").write_text(LARGE)
    limits = ChildLimits(60.0, 2048, 16, 64)
    pool = ProcessPool(EnvironmentSource(str(tmp_path / "large.py"), "Large", {}, limits, 8, 8), 1, 120.0)
    first = {FIRST: True, "record": {"extra_info": "x" * 2**20}, "seed": 1}
    for request in (first, {"turn": Turn("y" * 2**20)}):
        asked = [pool.submit({"key": key, **request}) for key in range(8)]
        assert [pool.take(it).why for it in asked] == [""] * 8
    pool.close()


@pytest.mark.parametrize(
    ("name", "kwargs", "why"),
    [
        ("Nothing", {}, "cannot load 'Nothing': ImportError: no class 'Nothing' in it"),
        ("Step", {}, "class 'Step' does not extend it"),
        ("Counter", {"begin": 1}, "cannot load 'Counter': TypeError: got an unexpected keyword argument 'begin'"),
        ("Absent", {}, "Absent cannot run here: no such site"),
    ],
)
def test_what_cannot_start_is_one_line(
    make: Callable[..., AgentLoop], name: str, kwargs: dict[str, Any], why: str
) -> None:
    with pytest.raises(InputError, match=re.escape(why)) as caught:
        make(name, kwargs=kwargs)
    assert "\n" not in str(caught.value) and "environment.path=" in str(caught.value)


def test_a_new_conversation_is_a_sequence_of_the_trajectory(make: Callable[..., AgentLoop], tokenizer: Any) -> None:
    """Its prompt is all that the model reads, and its tokens follow those of the conversation before."""
    asked: list[Request] = []

    def says(request: Request) -> str:
        asked.append(request)
        return "xy"

    (one, _), metrics = run(make("Forgetful"), tokenizer, ["ab", "stop"], says)
    assert tokenizer.decode(one.prompt_ids) == "<|bos|>abgo on!"
    assert one.finish_reason == "stop" and one.num_turns == 4
    (start,) = one.sequence_starts - len(one.prompt_ids)  # type: ignore[operator,arg-type]
    after = one.token_ids[start:]
    assert tokenizer.decode(after) == "<|bos|>sumxy<|eos|>xy<|eos|>3xy<|eos|>"
    assert one.mask.tolist().count(1) == 4 * 3 and not one.mask[start : start + 7].any()
    requests = [it for it in asked if it.uid == "file:0:0"]
    assert requests[2].prompt_ids.tolist() == after[:7].tolist() and not len(requests[2].prefix_ids)  # type: ignore
    assert requests[3].prefix_ids.tolist() == after[7:11].tolist()
    assert [it.position for it in requests] == [0, 4, start + 7, start + 11]
    assert metrics["env/steps"] == 8


@pytest.mark.parametrize("template_history", [False, True])
def test_a_turn_that_the_template_changes_starts_a_sequence(
    make: Callable[..., AgentLoop], tokenizer: Any, template_history: bool
) -> None:
    """A template that drops what precedes "=" in earlier turns."""
    template = (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "{{ message['content'].split('=')[-1] + eos_token }}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    )
    loop = make("Counter", data=DataConfig(chat_template=template), template_history=template_history)
    (one,), _ = run(loop, tokenizer, ["ab"], lambda request: "y" if len(request.prefix_ids) else "xy=z")
    text = tokenizer.decode(one.token_ids)
    if not template_history:
        assert text == "xy=z<|eos|>1y<|eos|>2y<|eos|>" and one.sequence_starts is None
        return
    assert text == "xy=z<|eos|>abgo on!z<|eos|>1xy=z<|eos|>abgo on!z<|eos|>1z<|eos|>2xy=z<|eos|>"
    assert one.num_sequences == 3 and one.num_turns == 3 and one.mask.sum() == 15
    (one,), _ = run(loop, tokenizer, ["ab"], lambda request: "y")
    assert tokenizer.decode(one.token_ids) == "y<|eos|>1y<|eos|>2y<|eos|>" and one.num_sequences == 1
