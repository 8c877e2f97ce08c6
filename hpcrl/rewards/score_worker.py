"""What a scoring process runs: the rules, or one custom reward function, on requests that come over a pipe.

Imported in the child: the standard library alone here, so that a worker starts in a moment and stays small.
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
from hpcrl.sandbox import worker_supervisor
from hpcrl.sandbox.worker_process import Answer, Outcome, Ready, answer_in_turn, describe, end_strays, use_one_thread

if TYPE_CHECKING:
    import asyncio

MOST_BYTES = 4096  # of a result, each of whose numbers is 8: it travels to rank 0
MOST_ENTRIES = 256  # of a result
MOST_SCORE = (2 - 2**-23) * 2.0**127  # float32's largest number

Plain = dict[str, float | str]


@dataclass(frozen=True)
class Source:
    """What scores: the function `name` of the Python file `path`, or with path None the built-in rules.

    `batched`: the function takes lists. `at_once`: how many awaitables of a coroutine function may be under way; None
    for one call after the other. `timeout`: seconds, of each of those awaitables.
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
        """Loads the function, says so, and answers (number, request) by an Answer until the pipe closes."""
        worker_supervisor.supervise(lambda: work(pipe, self, memory_limit_mb), log)

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
    except BaseException as error:  # the file is the user's: SystemExit too must become one line
        pipe.send(Ready(why=describe(error)))
        return
    if inspect.iscoroutinefunction(function):
        import asyncio  # half of what a worker imports, and most functions are plain
    if source.at_once is not None and inspect.iscoroutinefunction(function):
        pipe.send(Ready(source.at_once))
        asyncio.run(answer_concurrently(pipe, function, source))
        return
    answer_in_turn(pipe, lambda request: answer(function, request, source), memory_limit_mb)


def score_by_rule(data_source: str, **request: Any) -> Any:
    """The built-in rule's result."""
    from hpcrl.rewards.registry import scorer_for

    return scorer_for(data_source)(data_source, **request)


def load_function(path: str, name: str) -> Callable[..., Any]:
    """The function `name` of the Python file `path`, whose own folder it may import from."""
    function = getattr(import_file(path), name, None)
    if not callable(function):
        raise ImportError(f"no function {name!r} in it")
    return function


def answer(function: Callable[..., Any], request: dict[str, Any], source: Source) -> Outcome:
    """One call of the function; whatever it raises becomes an error."""
    try:
        result = function(**request, **source.kwargs)
        if inspect.isawaitable(result):
            import asyncio

            result = asyncio.run(_finish(result))
        return Outcome("ok", each(result, request) if source.batched else plain(result))
    except BaseException as error:
        return Outcome("errors", None, describe(error))


async def answer_concurrently(pipe: Connection, function: Callable[..., Coroutine], source: Source) -> None:
    """Calls of a coroutine function as they come, each under its own timeout, until the pipe closes."""
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
            end_strays()

    def hear() -> None:
        try:
            while pipe.poll():
                task = asyncio.ensure_future(one(*pipe.recv()))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
        except EOFError:
            closed.set()

    asyncio.get_running_loop().add_reader(pipe.fileno(), hear)
    await closed.wait()


async def _finish(awaitable: Any) -> Any:
    return await awaitable


def each(results: Any, request: dict[str, Any]) -> list[Outcome]:
    """The outcomes of a batched call; an entry that is no score costs that sample alone."""
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
    """A result as {"score": float, ...} of numbers and strings; ValueError where the score is no finite float32.

    A bare number is its own accuracy, as in verl: {"score": x, "acc": x}. Names and values have 4 KB (MOST_BYTES, in
    UTF-8): where they are more, texts are cut, the longest first; numbers and names that alone are more are an error.
    """
    extras = dict(result) if isinstance(result, dict) else {"score": result, "acc": result}
    extras = {key: value for key, value in extras.items() if value is not None}  # as if the key were not there
    if "score" not in extras:
        raise ValueError(f"the result has no 'score', only {', '.join(map(str, extras)) or 'nothing'}")
    if len(extras) > MOST_ENTRIES:
        raise ValueError(f"the result has {len(extras)} entries; expected at most {MOST_ENTRIES}")
    score = extras["score"]
    if isinstance(score, (str, bytes, list, tuple, dict, set)):
        raise ValueError(f"the score is a {type(score).__name__}; expected a number, or a dict with 'score'")
    if not abs(float(score)) <= MOST_SCORE:
        raise ValueError(f"the score is {score!r}; expected a number that is finite as a float32")
    return cut({str(key): number_or_text(value) for key, value in extras.items()} | {"score": float(score)})


def number_or_text(value: Any) -> float | str:
    if isinstance(value, str):
        return value[:MOST_BYTES]
    try:
        number = float(value)  # bool, int, numpy and torch scalars
        return number if abs(number) < math.inf else math.nan  # one infinity would be the mean of them all
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return str(value)[:MOST_BYTES]


def cut(result: Plain) -> Plain:
    """The result in MOST_BYTES, its texts cut to the one length at which they fit."""
    texts = {key: value.encode(errors="replace") for key, value in result.items() if isinstance(value, str)}
    left = MOST_BYTES - sum(len(key.encode(errors="replace")) for key in result) - 8 * (len(result) - len(texts))
    if left < 0:
        raise ValueError(
            f"the result's names and numbers take {MOST_BYTES - left} bytes; expected at most {MOST_BYTES}"
        )
    share = left
    for num_shorter, length in enumerate(sorted(map(len, texts.values()))):
        share = left // (len(texts) - num_shorter)
        if length > share:
            break
        left -= length
    return result | {key: text[:share].decode(errors="ignore") for key, text in texts.items() if len(text) > share}
