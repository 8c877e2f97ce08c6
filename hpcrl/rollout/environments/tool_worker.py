"""Program of a tool process: runs the user's tools and simulated user, on requests from a pipe."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from multiprocessing.connection import Connection
from typing import Any, ClassVar, NamedTuple

from hpcrl.data.pictures import as_png, open_picture
from hpcrl.rollout.environments.conversation import Interaction
from hpcrl.rollout.environments.tools import BadArguments, Tool, load_tools
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.user_code import import_file
from hpcrl.sandbox import worker
from hpcrl.sandbox.worker import Outcome, Ready, answer_in_turn, describe, use_one_thread

MAX_CHARACTERS = 2**16  # of an answer sent to the rank, which truncates it to tokens
MAX_METRICS = 64  # of one answer
PARTS = {"text", "image", "metrics"}  # of a tool's result


@dataclass(frozen=True)
class AgentSource:
    """The files of a tool process; either may be None. max_image_pixels: of a picture that a tool returns; 0: the model
    takes none."""

    tools: str | None
    interaction: str | None = None
    interaction_name: str = "Interaction"
    max_image_pixels: int = 0
    topic: ClassVar[str] = "rollout.multi_turn"

    def serve(self, pipe: Connection, memory_limit_mb: int | None, log: str | None) -> None:
        worker.supervise(lambda: work(pipe, self), log)

    def load_error(self, why: str) -> InputError:
        named = {"function_tool_path": self.tools, "interaction_path": self.interaction}
        files = ", ".join(f"rollout.multi_turn.{key}={path}" for key, path in named.items() if path is not None)
        return InputError(
            f"{files}: cannot load: {why}; expected Python files with functions marked @tool, or with a class "
            f"{self.interaction_name!r} that has start and respond"
        )


class ToolAnswer(NamedTuple):
    """The answer of a tool. rejected: the tool was not called, and `text` is the reason. images: PNG each, in RGB."""

    text: str
    metrics: dict[str, float]
    rejected: bool = False
    images: tuple[bytes, ...] = ()


class UserAnswer(NamedTuple):
    """The answer of the simulated user. `state` is JSON."""

    ends: bool
    text: str
    score: float | None
    state: str


def work(pipe: Connection, source: AgentSource) -> None:
    use_one_thread()
    try:
        tools = load_tools(source.tools) if source.tools is not None else {}
        user = load_user(source.interaction, source.interaction_name) if source.interaction is not None else None
    except BaseException as error:  # user code may raise SystemExit too
        pipe.send(Ready(why=describe(error)))
        return

    def answer(request: dict[str, Any]) -> Outcome:
        try:
            if "tool" in request:
                call = request["tool"], request["arguments"], request["record"]
                return Outcome("ok", run_tool(tools, *call, source.max_image_pixels, request["is_text"]))
            assert user is not None
            return Outcome("ok", call_user(user, request["state"], request["record"], request["messages"]))
        except BaseException as error:
            return Outcome("errors", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", describe(error))

    answer_in_turn(pipe, answer)


def load_user(path: str, name: str) -> Interaction:
    made = getattr(import_file(path), name, None)
    if not callable(made):
        raise ImportError(f"no class {name!r} in {path}")
    user = made()
    missing = [method for method in ("start", "respond") if not callable(getattr(user, method, None))]
    if missing:
        raise ImportError(f"class {name!r} in {path} has no method {' and no '.join(missing)}")
    return user


def run_tool(
    tools: Mapping[str, Tool],
    name: str,
    arguments: dict[str, Any],
    record: Mapping[str, Any] | None,
    max_image_pixels: int = 0,
    is_text: bool = False,
) -> ToolAnswer:
    """Call a tool. An unknown name or bad arguments return a rejected answer; the tool's exceptions are raised.

    Args:
        is_text: as in ToolCall.
    """
    if name not in tools:
        near = get_close_matches(name, tools, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        return ToolAnswer(f"no tool {name[:80]!r}; {hint}tools: {', '.join(tools)}", {}, rejected=True)
    tool = tools[name]
    try:
        values = tool.arguments(arguments, is_text)
    except BadArguments as error:
        return ToolAnswer(str(error), {}, rejected=True)
    if tool.needs_row:
        values["extra_info"] = (record or {}).get("extra_info") or {}
    result = tool.function(**values)
    metrics: dict[str, float] = {}
    images: tuple[bytes, ...] = ()
    if isinstance(result, dict) and result.keys() & {"text", "image"} and result.keys() <= PARTS:
        metrics = {str(key): float(value) for key, value in (result.get("metrics") or {}).items()}
        images = images_of(result.get("image"), max_image_pixels)
        result = result.get("text", "")
    finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    return ToolAnswer(bounded(text), dict(list(finite.items())[:MAX_METRICS]), images=images)


def images_of(value: Any, max_pixels: int) -> tuple[bytes, ...]:
    """Return the pictures of a tool's result, PNG each, in RGB. Raises ValueError for what is no picture."""
    images = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
    if images and not max_pixels:
        raise ValueError("the tool returned a picture; expected text, because the model has no vision tower")
    return tuple(as_png(open_picture(_as_source(image), "", max_pixels)) for image in images)


def _as_source(value: Any) -> Any:
    """A picture of Pillow as bytes, as in a data file; other values as they are."""
    if not hasattr(value, "has_transparency_data"):
        return value
    return as_png(value.convert("RGBA" if value.has_transparency_data else "RGB"))


def call_user(
    user: Interaction, state: str | None, record: Mapping[str, Any] | None, messages: list[dict[str, str]]
) -> UserAnswer:
    """Call the simulated user, and start it if there is no state yet."""
    values = user.start(dict(record or {})) if state is None else json.loads(state)
    ends, text, score = user.respond(values, messages)
    score = None if score is None else float(score)
    if score is not None and not math.isfinite(score):
        raise ValueError(f"the score is {score}; expected a finite number, or None")
    return UserAnswer(bool(ends), bounded(str(text)), score, json.dumps(values))


def bounded(text: str, most: int = MAX_CHARACTERS) -> str:
    """Return the text, or its first and last characters if it has more than `most`."""
    half = most // 2
    return text if len(text) <= most else text[:half] + text[-half:]
