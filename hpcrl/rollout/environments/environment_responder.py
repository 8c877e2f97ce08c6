"""Environments as what answers the model: one for each conversation, from its prompt to its end."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from hpcrl.algorithms.metrics import Metric
from hpcrl.rollout.environments.environment import Turn
from hpcrl.rollout.environments.environment_worker import EnvironmentSource, Started, Stepped
from hpcrl.rollout.environments.tools import Parser, parsed
from hpcrl.rollout.environments.turn_handler import Dialog, Info, PromptOf, Reply, Tally
from hpcrl.rollout.protocol import Request
from hpcrl.runtime.exits import InputError, folded
from hpcrl.sandbox.forked_children import FIRST, LAST, ChildLimits
from hpcrl.sandbox.process_pool import ProcessPool
from hpcrl.sandbox.worker import Outcome

if TYPE_CHECKING:
    from hpcrl.config.schema import EnvironmentConfig, MultiTurnConfig

LATE_SECONDS = 120.0  # after which the process that enforces the timeouts is replaced, and all environments end
ENVIRONMENT_COUNTS = ("steps", "timeouts", "crashes", "errors")


def environment_pool(cfg: EnvironmentConfig, most: int, log_path: str | None) -> ProcessPool:
    """The process that forks environments, at most `most` at a time. Raises InputError if the file is unusable."""
    assert cfg.path is not None
    at_once = cfg.num_workers or len(os.sched_getaffinity(0))
    limits = ChildLimits(cfg.timeout, cfg.memory_limit_mb, cfg.max_processes, cfg.max_file_mb)
    source = EnvironmentSource(cfg.path, cfg.name, cfg.kwargs, limits, most, at_once)
    return ProcessPool(source, 1, cfg.timeout + LATE_SECONDS, log_path=log_path)


@dataclass(eq=False)
class EnvironmentResponder:
    """`pool` is an `environment_pool`, in which keys of environments come from `keys`, which does not repeat itself. At
    most `most` are open. prompt_of: as in `TurnHandler`, of a first prompt, whose tokens are limited. seed: of the job.

    A conversation whose environment fails has failed, and its info has the reason.
    """

    cfg: MultiTurnConfig
    pool: ProcessPool
    keys: Iterator[int]
    most: int
    parser: Parser
    prompt_of: PromptOf
    seed: int
    tally: Tally
    _unopened: deque[tuple[int, Request, Dialog]] = field(default_factory=deque, init=False)
    _open: dict[int, int] = field(default_factory=dict, init=False)  # conversation -> key
    _asked: dict[int, tuple[int, Request | None, Dialog]] = field(default_factory=dict, init=False)  # by conversation
    _closing: list[int] = field(default_factory=list, init=False)  # numbers of requests

    def open(self, number: int, request: Request, dialog: Dialog) -> None:
        self._unopened.append((number, request, dialog))
        self._open_more()

    def begin(self, number: int, dialog: Dialog, text: str) -> bool:
        calls = parsed(self.parser, text, self.cfg.max_parallel_calls) if dialog.tools else []
        dialog.num_tool_calls += len(calls)
        is_cut = dialog.conversation.finish_reason == "length"
        turn = Turn(text, calls, dialog.over is not None, *dialog.conversation.usage, is_cut)
        self._ask(number, {"turn": turn}, None, dialog)
        return True

    def poll(self) -> Iterator[tuple[int, Reply | np.ndarray]]:
        self.pool.pump()
        for closed in [it for it in self._closing if self.pool.has(it)]:
            self.pool.take(closed)
            self._closing.remove(closed)
        for number in [number for number, (asked, _, _) in self._asked.items() if self.pool.has(asked)]:
            asked, request, dialog = self._asked.pop(number)
            outcome = self.pool.take(asked)
            if outcome.fate != "ok":
                yield number, self._failed(outcome.fate, outcome.why)
            elif request is not None:
                yield number, self._prompt(number, outcome.result, request, dialog)
            else:
                yield number, self._reply(outcome)

    def close(self, number: int, info: Info | None = None) -> None:
        for name, value in (info or {}).items():
            if not isinstance(value, str) and math.isfinite(value):
                self.tally.note(name, value)
        if (asked := self._asked.pop(number, None)) is not None:
            self._closing.append(asked[0])
        if (key := self._open.pop(number, None)) is not None:
            self._closing.append(self.pool.submit({"key": key, LAST: True}))
        self._open_more()

    def end(self) -> None:
        self._unopened.clear()
        for number in list(self._open):
            self.close(number)
        for closed in self._closing:
            self.pool.take(closed)
        self._closing = []

    def reject(self, error: Exception) -> Reply:
        return self._failed("errors", f"its messages: {folded(error)}")

    def metrics(self) -> dict[str, Metric]:
        return self.tally.metrics()

    def _open_more(self) -> None:
        while self._unopened and len(self._open) < self.most:
            number, request, dialog = self._unopened.popleft()
            self._open[number] = next(self.keys)
            digest = blake2b(f"{self.seed}\0{request.uid}".encode(), digest_size=4).digest()
            seed = int.from_bytes(digest, "little") >> 1
            self._ask(number, {FIRST: True, "record": dict(dialog.record), "seed": seed}, request, dialog)

    def _ask(self, number: int, request: dict, opened: Request | None, dialog: Dialog) -> None:
        self._asked[number] = self.pool.submit({"key": self._open[number], **request}), opened, dialog

    def _prompt(self, number: int, started: Started, request: Request, dialog: Dialog) -> Reply | np.ndarray:
        """The tokens of the first prompt."""
        dialog.messages += started.messages
        dialog.state, dialog.tools = started.state, started.tools
        dialog.is_new = started.is_prompt
        if not started.messages and started.tools is None:
            return np.asarray(request.prompt_ids, np.int32)
        try:
            return self.prompt_of(dialog.prompt, started.messages, started.tools)
        except InputError as error:
            return self._failed("errors", folded(error))

    def _reply(self, outcome: Outcome) -> Reply:
        stepped: Stepped = outcome.result
        step = stepped.step
        self.tally.counts["steps"] += 1
        self.tally.note("reward_per_turn", step.reward or 0.0)
        started = step.new_conversation, step.tools
        return Reply(step.messages, step.done, step.reward or 0.0, False, step.info, stepped.state, *started)

    def _failed(self, fate: str, why: str) -> Reply:
        topic = EnvironmentSource.topic
        self.tally.fail(fate, f"{topic}: a sample does not count, because its environment failed ({fate}): {why}")
        return Reply(failed=True, info={"error": f"{fate}: {why}"})
