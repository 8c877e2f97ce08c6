"""Environments and shells that do their worst, 32 at once: each costs its own sample, and nothing of them is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpcrl.rollout.environments.loop import AgentLoop
from hpcrl.sandbox.process_tree import descendants_of
from hpcrl.sandbox.task_sandbox import probe_sandbox
from tests.processes import with_argument
from tests.rollout.environments.test_environments import HOSTILE, make, run  # noqa: F401  # a fixture

REPOSITORY = Path(__file__).parents[3]
NAP = f"1002.{os.getpid()}"  # seconds; tells this test's processes from those of others
ENDS = HOSTILE | {
    "reset hangs": "timeouts",
    "reset returns a number": "errors",
    "children with memory": "crashes",
    "endless": "length",
    "floods": "length",
}
SLOW = "hang", "reset hangs"

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("how", ENDS)
def test_32_of_a_kind(make: Callable[..., AgentLoop], tokenizer: Any, how: str) -> None:  # noqa: F811
    limits = {"timeout": 2.0 if how in SLOW else 60.0, "memory_limit_mb": 512, "max_processes": 16, "max_file_mb": 8}
    loop = make("Hostile", **limits)
    prompts = [*[how] * 32, "plain", "daemon"]
    found, metrics = run(loop, tokenizer, prompts, lambda request: "xy")
    reason = ENDS[how] if ENDS[how] == "length" else "error"
    assert [one.finish_reason for one in found] == [reason] * 32 + ["stop"] * 2
    assert ENDS[how] == "length" or metrics[f"env/{ENDS[how]}"] == 32
    assert all(one.num_turns == 3 for one in found[32:])
    pool: Any = loop._pool
    await_end(lambda: descendants_of(pool._workers[0].pid)[1:])  # without the process that forks
    assert not list(Path(util.get_temp_dir()).glob("tmp*/*"))


COMMANDS = {  # and a part of the output
    ":(){ :|:& };:; sleep 9": "[processes",
    "yes > big": "No space left",
    "yes | head -c 100M": "yyyyyyyyy",
    "sleep 1000": "[timeout",
    "python -c 'x = []\nwhile True: x.append(bytes(1 << 20))'": "MemoryError",
    f"for i in 1 2 3 4 5 6 7 8; do setsid sleep {NAP} & done; echo left": "left",
    "kill -9 -1; kill -9 1; kill -INT 1; echo alive": "alive",
    "rm -rf / 2> /dev/null; exit 3": "exit code 3",
}
SHELL = """
import json, sys
import numpy as np
from hpcrl.config.schema import DataConfig, MultiTurnConfig
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.rollout.environments.loop import AgentLoop
from hpcrl.rollout.protocol import Request, SamplingParams
from hpcrl.sandbox import fork_server
from tests.rollout.environments.scripted import ScriptedEngine

tokenizer, commands = load_tokenizer("configs/tool_tokenizer"), json.loads(sys.argv[2])

def says(request):
    calls = commands[int(request.uid)]
    number = tokenizer.decode(request.prefix_ids).count("</tool_call>")
    call = {"name": "bash", "arguments": {"command": calls[min(number, len(calls) - 1)]}}
    text = f"<tool_call>{json.dumps(call)}</tool_call>" if number < len(calls) else "done"
    return np.array([*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id], np.int32)

if __name__ == "__main__":
    print(*fork_server.start(), flush=True)
    kwargs = {"timeout": 600.0 if sys.argv[3] else 10.0, "memory_mb": 256, "disk_mb": 32, "processes": 24}
    environment = {"path": sys.argv[1], "name": "ShellTask", "timeout": 600.0, "num_workers": 32, "kwargs": kwargs}
    cfg = MultiTurnConfig.model_validate({"enable": True, "environment": environment})
    loop = AgentLoop(cfg, DataConfig(max_prompt_length=1000), tokenizer)
    print(loop._pool._workers[0].pid, flush=True)
    prompt = [{"role": "user", "content": "x"}]
    records = [{"prompt": prompt, "extra_info": {"test": "true"}} for _ in commands]
    requests = [Request([1, 5], str(number)) for number in range(len(commands))]
    sampling = SamplingParams(4000, eos_token_ids=(tokenizer.eos_token_id,))
    found, _ = loop.run(ScriptedEngine(says), requests, records, sampling, seed=0, step=0)
    loop.close()
    rewards = [0.0 if one.rewards is None else one.rewards.sum().item() for one in found]
    texts = [(one.finish_reason, reward, tokenizer.decode(one.token_ids)) for one, reward in zip(found, rewards)]
    print(json.dumps(texts))
"""


def begin(folder: Path, commands: list[list[str]], sleeps: bool) -> subprocess.Popen[str]:
    """A rank whose agents run these commands, one after the other."""
    if why := probe_sandbox().why_not:
        pytest.skip(why)
    for name, text in (("rank.py", SHELL), ("shell.py", "from hpcrl.api import ShellTask")):
        (folder / name).write_text(text)
    (folder / "t").mkdir(exist_ok=True)
    given = [str(folder / "rank.py"), str(folder / "shell.py"), json.dumps(commands), "1" if sleeps else ""]
    environ = os.environ | {"TMPDIR": str(folder / "t"), "PYTHONPATH": str(REPOSITORY)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *given], cwd=REPOSITORY, env=environ, text=True, **pipes)


def test_32_shells(tmp_path: Path) -> None:
    kinds = list(COMMANDS)
    commands = [[kinds[(number + turn) % len(kinds)] for turn in range(3)] for number in range(32)]
    out, error = begin(tmp_path, commands, sleeps=False).communicate(timeout=550)
    found = json.loads(out.splitlines()[-1]) if out else error
    for number, (reason, reward, text) in enumerate(found):
        assert (reason, reward) == ("stop", 1.0), (commands[number], text)
        for command in commands[number]:
            assert COMMANDS[command] in text, (command, text)
    await_end(lambda: with_argument(NAP))
    assert not list((tmp_path / "t").iterdir())


@pytest.mark.parametrize("which", ["rank", "supervisor", "forking process", "all"])
def test_nothing_is_left_after_a_kill(tmp_path: Path, which: str) -> None:
    rank = begin(tmp_path, [[f"sleep {NAP} &", f"sleep {NAP}"]] * 32, sleeps=True)
    assert rank.stdout is not None and rank.stdout.readline() == "\n"
    supervisor = psutil.Process(int(rank.stdout.readline()))
    give_up = time.monotonic() + 300
    while len(with_argument(NAP)) < 64:
        assert time.monotonic() < give_up and rank.poll() is None, rank.communicate()
        time.sleep(0.2)
    processes = psutil.Process(rank.pid).children(recursive=True)
    (forking,) = supervisor.children()
    killed = {"rank": [psutil.Process(rank.pid)], "supervisor": [supervisor], "forking process": [forking]}
    chosen = killed.get(which) or [psutil.Process(rank.pid), *processes]
    for signum in (signal.SIGSTOP, signal.SIGKILL):  # all at a moment, as a batch system does
        for process in chosen:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signum)
    out, error = rank.communicate(timeout=300)
    if which not in ("rank", "all"):  # it goes on
        assert [reason for reason, *_ in json.loads(out.splitlines()[-1])] == ["error"] * 32, error
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive and not with_argument(NAP)
    left = list((tmp_path / "t").iterdir())
    assert len(left) == (which == "all")
    again, _ = begin(tmp_path, [["true"]], sleeps=False).communicate(timeout=300)
    assert again.splitlines()[0].split() == list(map(str, left)) and not list((tmp_path / "t").iterdir())


def await_end(left: Callable[[], Any]) -> None:
    give_up = time.monotonic() + 30
    while found := left():
        assert time.monotonic() < give_up, found
        time.sleep(0.05)
