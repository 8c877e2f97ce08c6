"""The tools of a server of the Model Context Protocol (https://modelcontextprotocol.io), over its standard streams."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from hpcrl.rollout.environments.environment import Environment, Message, Schema, Step, Turn
from hpcrl.rollout.environments.tools import ToolCall


class McpTools(Environment):
    """Tools of an MCP server, one for each trajectory; it ends with the trajectory. Needs the extra `mcp`.

    The model's calls go to the server, one after the other; what it rejects is an error that the model reads. A turn
    without a call ends the trajectory. There is no reward: a reward function has to give one
    (`reward.custom_reward_function`), or a class that extends this one and its `step`.

    Args:
        command: the server's command line.
    """

    def __init__(self, command: str) -> None:
        self.command = shlex.split(command)

    @classmethod
    def check(cls) -> None:
        import mcp  # noqa: F401  an ImportError names what is missing

    def reset(self, record: dict[str, Any], seed: int) -> tuple[Sequence[Message], Sequence[Schema]]:
        from anyio.from_thread import start_blocking_portal
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import stdio_client

        program, *arguments = self.command
        self.opened = ExitStack()
        self.portal = self.opened.enter_context(start_blocking_portal())
        server = stdio_client(StdioServerParameters(command=program, args=arguments))
        streams = self.opened.enter_context(self.portal.wrap_async_context_manager(server))
        session = ClientSession(*streams)
        self.session = self.opened.enter_context(self.portal.wrap_async_context_manager(session))
        self.portal.call(self.session.initialize)
        tools = self.portal.call(self.session.list_tools).tools
        return [], [_schema(tool.model_dump(by_alias=True)) for tool in tools]

    def step(self, turn: Turn) -> Step:
        if not turn.calls or turn.is_last:
            return Step(done=True)
        return Step(self.call_tools(turn.calls))

    def close(self) -> None:
        self.opened.close()

    def call_tool(self, call: ToolCall) -> str:
        try:
            found: Any = self.portal.call(self.session.call_tool, call.name, call.arguments)
        except Exception as error:  # the server's, such as an unknown tool
            return f"error: {' '.join(str(error).split())[:200]}"
        parts = [part.model_dump(by_alias=True) for part in found.content]
        text = "\n".join(part.get("text", f"[{part['type']}]") for part in parts)
        return f"error: {text}" if found.model_dump(by_alias=True).get("isError") else text


def _schema(tool: dict[str, Any]) -> Schema:
    """A tool of MCP in OpenAI's format."""
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["inputSchema"]}
    return {"type": "function", "function": function}
