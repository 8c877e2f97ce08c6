"""What a scoring process runs: the built-in rules, or a custom reward function, on requests from a pipe.

Imported in the child: standard library only, so that a worker starts fast and stays small.
"""

from __future__ import annotations

import inspect
import math
import os
import resource
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, ClassVar

from hpcrl.runtime.exits import InputError
from hpcrl.runtime.user_code import import_file
from hpcrl.sandbox import worker
from hpcrl.sandbox.worker import Answer, Outcome, Ready, answer_in_turn, describe, kill_leftovers, use_one_thread

if TYPE_CHECKING:
    import asyncio

MAX_BYTES = 4096  # of a result that is sent to rank 0; each number has 8
MAX_ENTRIES = 256  # of a result
MAX_SCORE = (2 - 2**-23) * 2.0**127  # float32's largest number

Plain = dict[str, float | str]


@dataclass(frozen=True)
class Source:
    """The function `name` of the Python file `path`, or the built-in rules if path is None.

    batched: the function takes lists. at_once: how many calls of a coroutine function run concurrently; None for one
    call after the other. timeout: seconds, for each of these concurrent calls.
    """

    path: str | None = None
    name: str = "compute_score"
    kwargs: dict[str, Any] = field(default_factory=dict)
    batched: bool = False
    at_once: int | None = None
    timeout: float = 10.0
    topic: ClassVar[str] = "reward"

    @property
    def signature(self) -> str:
        arguments = "data_source, solution_str, ground_truth, extra_info"
        return f"{self.name}({arguments.replace(',', 's,') + 's' if self.batched else arguments})"

    def serve(self, pipe: Connection, memory_limit_mb: int | None, log: str | None) -> None:
        """Load the function, send Ready, and answer each (number, request) until the pipe closes."""
        worker.supervise(lambda: work(pipe, self, memory_limit_mb), log)

    def load_error(self, why: str) -> InputError:
        """The error to raise when the function cannot be loaded."""
        if self.path is None:
            return InputError(f"cannot start a scoring process: {why}; expected one to start (reward.memory_limit_mb?)")
        return InputError(
            f"reward.custom_reward_function.path={self.path}: cannot load {self.name!r}: {why}; "
            f"expected a Python file with {self.signature}"
        )


def work(pipe: Connection, source: Source, memory_limit_mb: int | None) -> None:
    use_one_thread()
    if memory_limit_mb is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit_mb << 20, memory_limit_mb << 20))
    try:
        function = score_by_rule if source.path is None else load_function(source.path, source.name)
    except BaseException as error:  # user code may raise SystemExit too
        pipe.send(Ready(why=describe(error)))
        return
    if inspect.iscoroutinefunction(function):
        import asyncio  # slow to import, and most functions are not coroutines
    if source.at_once is not None and inspect.iscoroutinefunction(function):
        pipe.send(Ready(source.at_once))
        asyncio.run(answer_concurrently(pipe, function, source))
        return
    answer_in_turn(pipe, lambda request: answer(function, request, source), memory_limit_mb)


def score_by_rule(data_source: str, **request: Any) -> Any:
    """Score with the built-in rule for the data source."""
    from hpcrl.rewards.registry import scorer_for

    return scorer_for(data_source)(data_source, **request)


def load_function(path: str, name: str) -> Callable[..., Any]:
    """Load the function `name` of a Python file, which may import from its own folder."""
    function = getattr(import_file(path), name, None)
    if not callable(function):
        raise ImportError(f"no function {name!r} in it")
    return function


def answer(function: Callable[..., Any], request: dict[str, Any], source: Source) -> Outcome:
    """Call the function once. Any exception becomes an outcome with fate "errors"."""
    try:
        result = function(**request, **source.kwargs)
        if inspect.isawaitable(result):
            import asyncio

            result = asyncio.run(_finish(result))
        return Outcome("ok", each(result, request) if source.batched else plain(result))
    except BaseException as error:
        return Outcome("errors", None, describe(error))


async def answer_concurrently(pipe: Connection, function: Callable[..., Coroutine], source: Source) -> None:
    """Run calls of a coroutine function concurrently, each with its own timeout, until the pipe closes."""
    import asyncio

    closed = asyncio.Event()
    under_way: set[asyncio.Task] = set()
    me = os.getpid()

    async def one(number: int, request: dict[str, Any]) -> None:
        try:
            result = await asyncio.wait_for(function(**request, **source.kwargs), source.timeout)
            outcome = Outcome("ok", plain(result))
        except asyncio.TimeoutError:
            outcome = Outcome("timeouts", None, f"longer than {source.timeout:g} s")
        except BaseException as error:
            outcome = Outcome("errors", None, describe(error))
        if os.getpid() != me:
            os._exit(0)
        pipe.send(Answer(number, outcome, time.monotonic()))
        if len(under_way) == 1:
            kill_leftovers()

    def receive() -> None:
        try:
            while pipe.poll():
                task = asyncio.ensure_future(one(*pipe.recv()))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
        except EOFError:
            closed.set()

    asyncio.get_running_loop().add_reader(pipe.fileno(), receive)
    await closed.wait()


async def _finish(awaitable: Any) -> Any:
    return await awaitable


def each(results: Any, request: dict[str, Any]) -> list[Outcome]:
    """Outcomes of a batched call. An invalid entry fails its own sample only."""
    results, expected = list(results), len(request["solution_strs"])
    if len(results) != expected:
        raise ValueError(f"{len(results)} results for {expected} responses")
    outcomes = []
    for result in results:
        try:
            outcomes.append(Outcome("ok", plain(result)))
        except Exception as error:
            outcomes.append(Outcome("errors", None, describe(error)))
    return outcomes


def plain(result: Any) -> Plain:
    """Convert a result to {"score": float, ...} of numbers and strings. Raises ValueError for an invalid score.

    A bare number is its own accuracy, as in verl: {"score": x, "acc": x}. The score must be a finite float32. Names and
    values may have 4 KB (MAX_BYTES, in UTF-8). If they have more, texts are cut, the longest first. Raises
    ValueError if numbers and names have more.
    """
    extras = dict(result) if isinstance(result, dict) else {"score": result, "acc": result}
    extras = {key: value for key, value in extras.items() if value is not None}  # like a missing key
    if "score" not in extras:
        raise ValueError(f"the result has no 'score', only {', '.join(map(str, extras)) or 'nothing'}")
    if len(extras) > MAX_ENTRIES:
        raise ValueError(f"the result has {len(extras)} entries; expected at most {MAX_ENTRIES}")
    score = extras["score"]
    if isinstance(score, (str, bytes, list, tuple, dict, set)):
        raise ValueError(f"the score is a {type(score).__name__}; expected a number, or a dict with 'score'")
    if not abs(float(score)) <= MAX_SCORE:
        raise ValueError(f"the score is {score!r}; expected a number that is finite as a float32")
    return cut({str(key): number_or_text(value) for key, value in extras.items()} | {"score": float(score)})


def number_or_text(value: Any) -> float | str:
    if isinstance(value, str):
        return value[:MAX_BYTES]
    try:
        number = float(value)  # bool, int, numpy and torch scalars
        return number if abs(number) < math.inf else math.nan  # one infinity would make every mean infinite
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return str(value)[:MAX_BYTES]


def cut(result: Plain) -> Plain:
    """Cut the texts of a result to one length such that it fits MAX_BYTES."""
    texts = {key: value.encode(errors="replace") for key, value in result.items() if isinstance(value, str)}
    room = MAX_BYTES - sum(len(key.encode(errors="replace")) for key in result) - 8 * (len(result) - len(texts))
    if room < 0:
        raise ValueError(f"the result's names and numbers take {MAX_BYTES - room} bytes; expected at most {MAX_BYTES}")
    share = room
    for num_shorter, length in enumerate(sorted(map(len, texts.values()))):
        share = room // (len(texts) - num_shorter)
        if length > share:
            break
        room -= length
    return result | {key: text[:share].decode(errors="ignore") for key, text in texts.items() if len(text) > share}
