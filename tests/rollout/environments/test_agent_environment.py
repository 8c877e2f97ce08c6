"""Agents with the real OpenAI client draw their turns from the endpoint; what they and others do wrong costs a sample.

The model is scripted; agents run in their real processes, 32 at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.algorithms.metrics import finish
from hpcrl.config.schema import DataConfig, MultiTurnConfig
from hpcrl.rollout.environments.loop import AgentLoop
from hpcrl.rollout.protocol import Request, SamplingParams, Trajectory
from hpcrl.sandbox.process_tree import descendants_of
from tests.rollout.environments.scripted import ScriptedEngine

pytest.importorskip("openai")

AGENTS = """
import asyncio, os, socket, subprocess, time
from urllib.parse import urlsplit

import httpx2
import openai

from hpcrl.api import AgentEnvironment

class Adder(AgentEnvironment):
    "Its prompt takes the place of the row's. It adds what the model asks for, and ends when there is no call."
    def __init__(self, unix_socket: bool = False):
        self.unix_socket = unix_socket

    def run(self, record, base_url, api_key):
        transport = httpx2.HTTPTransport(uds=self.socket_path)
        client = openai.OpenAI(base_url=base_url, api_key=api_key, http_client=httpx2.Client(transport=transport))
        parameters = {"type": "object", "properties": {"number": {"type": "integer"}}}
        tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
        messages, total = [{"role": "user", "content": record["prompt"][0]["content"] + "!"}], 0
        while True:
            found = client.chat.completions.create(model="x", messages=messages, tools=tools, temperature=0.1)
            message = found.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                info = {"total": total, "text": message.content, "num_tokens": found.usage.total_tokens}
                return float(total), info
            for call in message.tool_calls:
                total += eval(call.function.arguments)["number"]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": f"sum {total}"})

class Mixed(AgentEnvironment):
    async def run(self, record, base_url, api_key):
        how, place = record["prompt"][0]["content"], urlsplit(base_url)
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        first = [{"role": "user", "content": how}]

        async def ask(messages=first, client=client, **keys):
            found = await client.chat.completions.create(model="x", messages=messages, **keys)
            return found.choices[0].message.content

        def connect():
            return socket.create_connection((place.hostname, place.port))

        if how == "silent":
            return 1.0
        if how == "stranger":
            for key in ("", "guess"):
                try:
                    await ask(client=openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0))
                except (openai.AuthenticationError, openai.OpenAIError):
                    continue
        if how == "nonsense":
            for _ in range(20):
                with connect() as connection:
                    connection.sendall(os.urandom(1 << 16))
        if how == "slow":
            held = [connect() for _ in range(60)]
        if how == "huge":
            try:
                await ask([{"role": "user", "content": "x" * 9_000_000}])
            except (openai.APIStatusError, openai.APIConnectionError):
                pass
        if how == "picture":
            try:
                await ask([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}])
            except openai.BadRequestError:
                pass
        if how == "stream":
            options = {"stream": True, "stream_options": {"include_usage": True}}
            found = await client.chat.completions.create(model="x", messages=first, **options)
            text, usage = "", []
            async for chunk in found:
                text += "".join(choice.delta.content for choice in chunk.choices)
                usage += [chunk.usage.completion_tokens] if chunk.usage else []
            assert text == "xy" and usage == [3]
            return 1.0
        if how == "never":
            await ask()
            await asyncio.sleep(600)
        if how == "exit":
            await ask()
            os._exit(3)
        if how == "daemon":
            subprocess.Popen(["setsid", "sleep", "600"])
        if how == "many":
            texts = await asyncio.gather(*(ask([{"role": "user", "content": str(it)}]) for it in range(3)))
            return float(len(texts))
        text = await ask()
        if how == "raise":
            raise ValueError("a bad move")
        if how == "room":
            for _ in range(100):
                text = await ask([*first, {"role": "assistant", "content": text}, {"role": "user", "content": "a"}])
        return 1.0
"""
FATES = {"silent": "errors", "never": "timeouts", "exit": "crashes", "raise": "errors"}
HARMLESS = ("stranger", "nonsense", "slow", "huge", "picture", "daemon", "stream", "many", "plain", "room")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    (folder / "agents.py").write_text(AGENTS)
    return folder


@contextmanager
def running(folder: Path, tokenizer: Any, name: str, **keys: Any) -> Iterator[AgentLoop]:
    environment = {"path": str(folder / "agents.py"), "name": name, "timeout": 20.0, **keys}
    cfg = MultiTurnConfig.model_validate({"enable": True, "environment": environment})
    loop = AgentLoop(cfg, DataConfig(max_prompt_length=2000), tokenizer, log_path=str(folder / "log"), max_open=32)
    yield loop
    loop.close()


def run(
    loop: AgentLoop, tokenizer: Any, prompts: list[str], says: Callable[[Request], str], limit: int
) -> tuple[list[Trajectory], dict[str, Any]]:
    def turn(request: Request) -> np.ndarray:
        text = tokenizer(says(request), add_special_tokens=False)["input_ids"]
        return np.array([*text, tokenizer.eos_token_id], np.int32)

    requests = [Request(tokenizer(it)["input_ids"], f"file:{row}:0", 0) for row, it in enumerate(prompts)]
    records = [{"prompt": [{"role": "user", "content": it}], "extra_info": {}} for it in prompts]
    sampling = SamplingParams(limit, eos_token_ids=(tokenizer.eos_token_id,))
    engine: Any = ScriptedEngine(turn)
    found, metrics = loop.run(engine, requests, records, sampling, seed=1, step=1)
    return found, finish(metrics)


@pytest.mark.parametrize("unix_socket", [False, True])
def test_an_agent_of_the_openai_client(folder: Path, tokenizer: Any, unix_socket: bool) -> None:
    """Its messages follow the tokens that the model drew, which are in the response as they were drawn."""
    calls = [f'<tool_call>{{"name": "add", "arguments": {{"number": {it}}}}}</tool_call>' for it in (3, 4)]

    def says(request: Request) -> str:
        done = tokenizer.decode(request.prefix_ids).count("</tool_call>")
        return calls[done] if done < len(calls) else "fin"

    with running(folder, tokenizer, "Adder", kwargs={"unix_socket": unix_socket}) as loop:
        found, _ = run(loop, tokenizer, ["ab", "cd"], says, 400)
    for one, prompt in zip(found, ("ab", "cd"), strict=True):
        assert one.finish_reason == "stop" and one.num_turns == 3 and one.num_tool_calls == 2
        text = tokenizer.decode(one.prompt_ids)
        assert text.count(f"{prompt}!") == 1 and text.count(prompt) == 1
        drawn = "".join(tokenizer.decode(one.token_ids[one.mask == 1]).split("<|eos|>"))
        assert drawn.startswith(calls[0] + calls[1] + "fin")
        assert one.rewards.sum() == one.rewards[-1] == 7.0
        assert one.info == {"total": 7.0, "text": "fin", "num_tokens": len(one.prompt_ids) + len(one.token_ids)}
    log = (folder / "log").read_text().splitlines()[-1]
    assert log.count("parameters without effect: temperature") == 1


def test_what_agents_do_costs_their_sample(folder: Path, tokenizer: Any) -> None:
    prompts = [*FATES, *HARMLESS] * 2 + ["plain"] * 4
    with running(folder, tokenizer, "Mixed", num_workers=32) as loop:
        found, metrics = run(loop, tokenizer, prompts, lambda request: "xy", 120)
        pool: Any = loop._pool
        assert len(descendants_of(pool._workers[0].pid)) == 1  # the process that forks
    kinds: dict[str, list[Trajectory]] = {}
    for prompt, one in zip(prompts, found, strict=True):
        kinds.setdefault(prompt, []).append(one)
        assert one.finish_reason == "error" if prompt in FATES else one.finish_reason != "error", prompt
        assert (not one.mask.any()) == (prompt in FATES)
    for fate in ("errors", "crashes", "timeouts"):
        assert metrics[f"env/{fate}"] == 2 * list(FATES.values()).count(fate), fate
    for one in kinds["many"]:
        assert one.num_turns == 3 and one.rewards[-1] == 3.0
    assert all(one.rewards.sum() == 0 and one.num_turns > 5 for one in kinds["room"])
    assert all(one.num_turns == 1 and one.rewards.sum() == 1.0 for one in kinds["plain"])
