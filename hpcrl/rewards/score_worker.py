"""What a scoring process runs: one custom reward function, one request at a time over a pipe.

Imported in the child: the standard library alone here, so that a worker starts in a moment and stays small.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

# What goes over the pipe, worker to pool: ("ready", None), ("refused", why), ("score", dict) or ("error", why).
Reply = tuple[str, Any]


def serve(pipe: Connection, path: str, name: str, kwargs: dict[str, Any]) -> None:
    """Loads the function, says so, and answers requests until the pipe closes."""
    from hpcrl.launch import children

    # A session of its own: the pool, or the end of the rank, kills the worker with whatever the function has started.
    children.die_with_parent(own_session=True)
    try:
        function = load_function(path, name)
    except BaseException as error:  # the file is the user's: SystemExit too must become one line
        pipe.send(("refused", describe(error)))
        return
    pipe.send(("ready", None))
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        pipe.send(answer(function, request, kwargs))


def load_function(path: str, name: str) -> Callable[..., Any]:
    """The function `name` of the Python file `path`, whose own folder it may import from."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location("hpcrl_custom_reward", path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ImportError(f"no function {name!r} in it")
    return function


def answer(function: Callable[..., Any], request: dict[str, Any], kwargs: dict[str, Any]) -> Reply:
    """One call of the function as a reply; whatever it raises becomes an error."""
    try:
        result = function(**request, **kwargs)
        if inspect.isawaitable(result):
            result = asyncio.run(_finish(result))
        return "score", plain(result)
    except BaseException as error:
        return "error", describe(error)


async def _finish(awaitable: Any) -> Any:
    return await awaitable


def plain(result: Any) -> dict[str, float | str]:
    """A result as {"score": finite float, ...} of numbers and strings; ValueError where there is no finite score."""
    extras = dict(result) if isinstance(result, dict) else {"score": result}
    if "score" not in extras:
        raise ValueError(f"the result has no 'score', only {', '.join(map(str, extras)) or 'nothing'}")
    score = extras["score"]
    if isinstance(score, (str, bytes)) or not math.isfinite(float(score)):
        raise ValueError(f"the score is {score!r}; expected a finite number")
    return {str(key): number_or_text(value) for key, value in extras.items()} | {"score": float(score)}


def number_or_text(value: Any) -> float | str:
    if isinstance(value, str):
        return value
    try:
        return float(value)  # bool, int, numpy and torch scalars
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return str(value)


def describe(error: BaseException) -> str:
    """One line: the type, the message, and the user's line that raised it."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    where = f" ({os.path.basename(traceback.tb_frame.f_code.co_filename)}:{traceback.tb_lineno})" if traceback else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{where}"
