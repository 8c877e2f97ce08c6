"""What a scoring process runs: the rules, or one custom reward function, on requests that come over a pipe.

Imported in the child: the standard library alone here, so that a worker starts in a moment and stays small.
"""

from __future__ import annotations

import fcntl
import inspect
import math
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from hpcrl.launch import family, supervisor
from hpcrl.launch.user_code import import_file

if TYPE_CHECKING:
    import asyncio

HIGH = 512  # file descriptors from here on are out of the way of those that a careless function closes
MOST_BYTES = 4096  # of a result, each of whose numbers is 8: it travels to rank 0
MOST_ENTRIES = 256  # of a result
MOST_SCORE = (2 - 2**-23) * 2.0**127  # float32's largest number
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

Fate = Literal["ok", "timeouts", "crashes", "errors"]
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
        supervisor.supervise(lambda: work(pipe, self, memory_limit_mb), log)

    def refusal(self, why: str) -> str:
        """One line about a function that could not be loaded."""
        if self.path is None:
            return f"cannot start a scoring process: {why}; expected one to start (reward.memory_limit_mb?)"
        return (
            f"reward.custom_reward_function.path={self.path}: cannot load {self.name!r}: {why}; "
            f"expected a Python file with {self.signature}"
        )


class Outcome(NamedTuple):
    """What a request led to: `result` holds `score` and the extras if `fate` is "ok"; else `why` says what failed.

    Of a batched request, `result` is a list of outcomes.
    """

    fate: Fate
    result: Any
    why: str = ""


class Ready(NamedTuple):
    """The worker's first message; `at_once` is how many requests it is on at a time, `why` a failure's."""

    at_once: int = 1
    why: str | None = None


class Answer(NamedTuple):
    """`ended`: the monotonic time, one clock for a node, at which the worker was done with the request. `leaving`: the
    worker is worn out, does no more of what it was sent, and wants to be replaced."""

    number: int
    outcome: Outcome
    ended: float
    leaving: bool = False


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


def use_one_thread() -> None:
    """A node has many such processes; and each thread of a library takes address space."""
    for name in THREADS:
        os.environ.setdefault(name, "1")


def answer_in_turn(
    pipe: Connection, answer: Callable[[dict[str, Any]], Outcome], memory_limit_mb: int | None = None
) -> None:
    """Says that the worker is ready, and answers one request after the other until the pipe closes."""
    pipe.send(Ready())
    me, surroundings = os.getpid(), Surroundings()
    while True:
        try:
            number, request = pipe.recv()
        except EOFError:
            return
        surroundings.restore()
        outcome = answer(request)
        if os.getpid() != me:  # a process that the function forked, and that came back from it as well
            os._exit(0)
        leaving = outcome.fate == "errors" and memory_limit_mb is not None and address_space_mb() > memory_limit_mb / 2
        pipe.send(Answer(number, outcome, time.monotonic(), leaving))
        end_strays()


class Surroundings:
    """What a score finds: standard streams and working directory, whatever the one before did to them."""

    def __init__(self) -> None:
        self._folder = os.getcwd()
        high = min(HIGH, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 8)
        self._streams = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, high) for number in range(3)]

    def restore(self) -> None:
        os.chdir(self._folder)
        for number, kept in enumerate(self._streams):
            os.dup2(kept, number)
        for number, name in ((1, "stdout"), (2, "stderr")):
            if getattr(sys, name).closed:
                setattr(sys, name, open(number, "w", encoding="utf-8", errors="replace", closefd=False))


def address_space_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize() / 2**20


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


def end_strays() -> None:
    """Ends what a score has started and left, daemons too; multiprocessing's processes stay, which functions keep."""
    me, parent = os.getpid(), os.getppid()
    for orphan in family.children_of(parent):
        if orphan != me:
            family.kill_tree(orphan)
    if children := family.children_of(me):
        kept = {process.pid for process in multiprocessing.active_children()}
        for child in set(children) - kept:
            family.kill_tree(child)
            try:
                os.waitpid(child, 0)
            except ChildProcessError:
                pass


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


def describe(error: BaseException) -> str:
    """One line: the type, the message, and the user's line that raised it."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    where = f" ({os.path.basename(traceback.tb_frame.f_code.co_filename)}:{traceback.tb_lineno})" if traceback else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{where}"
