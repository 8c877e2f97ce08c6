"""A scripted agent uses the tools of a real MCP server, which keeps a state for each trajectory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from hpcrl.config.schema import DataConfig, MultiTurnConfig
from hpcrl.rollout.environments.loop import AgentLoop
from hpcrl.rollout.protocol import Request, SamplingParams
from tests.rollout.environments.scripted import ScriptedEngine

SERVER = """
from mcp.server import MCPServer

server = MCPServer("sums")
total = 0

@server.tool()
def add(number: int) -> str:
    "Adds to the sum."
    global total
    total += number
    return f"sum {total}"

server.run()
"""
CALLS = ['{"name": "add", "arguments": {"number": 3}}', '{"name": "add", "arguments": {"number": 4}}']
BAD = ['{"name": "add", "arguments": {"number": "x"}}', '{"name": "subtract", "arguments": {}}']


def test_tools_of_a_server(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "tools.py").write_text("from hpcrl.api import McpTools")
    kwargs = {"command": f"{sys.executable} {tmp_path / 'server.py'}"}
    environment = {"path": str(tmp_path / "tools.py"), "name": "McpTools", "kwargs": kwargs}
    cfg = MultiTurnConfig.model_validate({"enable": True, "environment": environment})
    scripts = [CALLS, BAD]

    def says(request: Request) -> np.ndarray:
        calls, turn = scripts[int(request.uid)], tokenizer.decode(request.prefix_ids).count("</tool_call>")
        text = f"<tool_call>{calls[turn]}</tool_call>" if turn < len(calls) else "done"
        return np.array([*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id], np.int32)

    loop = AgentLoop(cfg, DataConfig(max_prompt_length=1000), tokenizer)
    records = [{"prompt": [{"role": "user", "content": "x"}], "extra_info": {}}] * 2
    sampling = SamplingParams(900, eos_token_ids=(tokenizer.eos_token_id,))
    engine: Any = ScriptedEngine(says)
    requests = [Request([1, 5], str(number)) for number in range(2)]
    (good, bad), _ = loop.run(engine, requests, records, sampling, seed=0, step=0)
    loop.close()
    assert good.finish_reason == bad.finish_reason == "stop"
    text = tokenizer.decode(good.token_ids)
    assert text.index("sum 3") < text.index("sum 7")
    assert tokenizer.decode(bad.token_ids).count("error: ") == 2 and "sum" not in tokenizer.decode(bad.token_ids)
