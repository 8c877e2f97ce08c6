"""Turns of a conversation: on the leader of a replica, tools and users answer the model, or end the conversation."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcrl.algorithms.metrics import Max, Mean, Metric, Min, Sum
from hpcrl.rollout.environments.conversation import Answer, Conversation, Message, TurnTemplate
from hpcrl.rollout.environments.tool_worker import ToolAnswer
from hpcrl.rollout.environments.tools import BadCall, Call, Parser
from hpcrl.rollout.protocol import FinishReason, Trajectory
from hpcrl.sandbox.process_pool import ProcessPool
from hpcrl.sandbox.worker import Outcome

if TYPE_CHECKING:
    from hpcrl.config.schema import MultiTurnConfig


log = logging.getLogger(__name__)

MAX_NAME = 80  # characters of a name or an id that the model wrote
MAX_WARNINGS = 3  # log lines of a job per kind of failure; metrics count all of them

Record = Mapping[str, Any]


class TurnResult(NamedTuple):
    """What follows a turn of the model: `answer` and another turn; or None, and the conversation has ended with
    `finish_reason`."""

    conversation: int
    answer: Answer | None
    finish_reason: FinishReason = "stop"
    num_tool_calls: int = 0
    turn_scores: tuple[float, ...] = ()


@dataclass
class _Dialog:
    """State of a conversation on the leader. `pending`: numbers of the process pool's requests, or error texts of calls
    that reach no tool."""

    record: Record
    conversation: Conversation
    messages: list[Message] = field(default_factory=list)
    pending: list[int | str] = field(default_factory=list)
    calls: Sequence[Call] = ()  # of the latest turn; none: `pending` is the simulated user's request
    end: int | None = None  # last token of the latest turn
    num_answers: int = 0
    num_tool_calls: int = 0
    turn_scores: list[float] = field(default_factory=list)
    state: str | None = None  # of the simulated user, JSON


@dataclass(eq=False)
class TurnHandler:
    """Turns of one generation. `pool` runs an AgentSource. A response has at most `max_tokens`, answers included.

    The answer of a failed call is its error; a failed user ends the conversation. `counts` has all tool calls, those
    that timed out, crashed, raised, or reached no tool, and failed users. `warned` counts warnings of earlier
    generations too.
    """

    cfg: MultiTurnConfig
    pool: ProcessPool
    parser: Parser
    template: TurnTemplate
    text_of: Callable[[np.ndarray], str]
    max_tokens: int
    warned: Counter[str]
    counts: Counter[str] = field(default_factory=Counter, init=False)
    tool_metrics: dict[str, list[float]] = field(default_factory=dict, init=False)
    _dialogs: dict[int, _Dialog] = field(default_factory=dict, init=False)
    _waiting: dict[int, None] = field(default_factory=dict, init=False)  # conversations with pending calls, in order
    _results: list[TurnResult] = field(default_factory=list, init=False)

    def add_turn(self, number: int, conversation: Conversation, turn: np.ndarray, record: Record) -> None:
        """Handle the end of a model's turn. Does not wait."""
        dialog = self._dialogs.setdefault(number, _Dialog(record, conversation))
        text = self.text_of(turn)
        dialog.messages.append({"role": "assistant", "content": text})
        dialog.end = int(turn[-1]) if len(turn) else None
        if conversation.finish_reason not in ("stop", None):
            self._end(number, conversation.finish_reason)
        elif not self._may_answer(dialog):
            self._end(number, "stop")
        elif conversation.num_tokens >= self.max_tokens:
            self._end(number, "length" if self._tool_calls(text) else "stop")  # no room for the answer to a call
        elif self._start_calls(dialog, text):
            self._waiting[number] = None
        else:
            self._end(number, "stop")

    def poll(self) -> list[TurnResult]:
        """Return the results since the last call. Does not wait."""
        self.pool.pump()
        for number in [number for number in self._waiting if self._is_answered(self._dialogs[number])]:
            del self._waiting[number]
            self._handle_answers(number, self._dialogs[number])
        found, self._results = self._results, []
        return found

    def _may_answer(self, dialog: _Dialog) -> bool:
        turns, answers = self.cfg.max_assistant_turns, self.cfg.max_user_turns
        return (turns is None or dialog.conversation.num_turns < turns) and (
            answers is None or dialog.num_answers < answers
        )

    def _start_calls(self, dialog: _Dialog, text: str) -> bool:
        """Start the tool calls of the turn, or the user's. Return whether there are any."""
        dialog.calls = self._tool_calls(text)
        if dialog.calls:
            dialog.pending = [self._begin(call, dialog) for call in dialog.calls]
        elif self.cfg.interaction_path is not None:
            request = {"state": dialog.state, "record": dialog.record, "messages": dialog.messages}
            dialog.pending = [self.pool.submit(request)]
        return bool(dialog.pending)

    def _tool_calls(self, text: str) -> Sequence[Call]:
        if self.cfg.function_tool_path is None:
            return []
        try:
            calls = list(self.parser(text) or ())[: self.cfg.max_parallel_calls]
            for call in calls:
                if not isinstance(call, Call):
                    raise TypeError(f"the parser returned a {type(call).__name__}; expected a ToolCall or a BadCall")
            return calls
        except Exception as error:  # the parser may be the user's code
            return [BadCall(f"{type(error).__name__}: {error}")]

    def _begin(self, call: Call, dialog: _Dialog) -> int | str:
        self.counts["calls"] += 1
        dialog.num_tool_calls += 1
        if isinstance(call, BadCall):
            self.counts["rejected"] += 1
            return f"error: {call.why}"
        request = {"tool": call.name, "arguments": call.arguments, "is_text": call.is_text, "record": dialog.record}
        return self.pool.submit(request)

    def _is_answered(self, dialog: _Dialog) -> bool:
        return all(isinstance(pending, str) or self.pool.has(pending) for pending in dialog.pending)

    def _handle_answers(self, number: int, dialog: _Dialog) -> None:
        """All pending calls have ended."""
        outcomes = [pending if isinstance(pending, str) else self.pool.take(pending) for pending in dialog.pending]
        dialog.pending = []
        if dialog.calls:
            answers = [self._tool_message(call, found) for call, found in zip(dialog.calls, outcomes, strict=True)]
        else:
            answers = self._user_messages(dialog, outcomes[0])
        if not answers:
            self._end(number, "stop")
            return
        answer = self.template.answer(answers, dialog.end)
        if dialog.conversation.num_tokens + len(answer.token_ids) >= self.max_tokens:  # no room for the model
            self._end(number, "length")
            return
        dialog.messages += map(_as_text, answers)
        dialog.num_answers += 1
        self._results.append(TurnResult(number, answer))

    def _tool_message(self, call: Call, outcome: Outcome | str) -> Message:
        text, images = (outcome, ()) if isinstance(outcome, str) else self._tool_answer(outcome)
        limit, side = self.cfg.max_tool_response_length, self.cfg.tool_response_truncate_side
        message = {"role": "tool", "content": self.template.shortened(text, limit, side), "images": images}
        names = {"name": call.name[:MAX_NAME], "tool_call_id": (call.id or "")[:MAX_NAME]}
        return message | {key: text for key, text in names.items() if text}

    def _tool_answer(self, outcome: Outcome) -> tuple[str, tuple[bytes, ...]]:
        """Text and pictures."""
        if outcome.fate != "ok":
            self._count_failure("call of a tool", outcome.fate, outcome.why)
            return f"error: {outcome.result or outcome.why}", ()
        answer: ToolAnswer = outcome.result
        for name, value in answer.metrics.items():
            self.tool_metrics.setdefault(name, []).append(value)
        self.counts["rejected"] += answer.rejected
        return f"error: {answer.text}" if answer.rejected else answer.text, answer.images

    def _user_messages(self, dialog: _Dialog, outcome: Outcome | str) -> list[Message]:
        """Return the simulated user's message; an empty list ends the conversation."""
        assert isinstance(outcome, Outcome)
        if outcome.fate != "ok":
            self._count_failure("user", "user_failures", f"{outcome.fate}: {outcome.why}")
            return []
        dialog.state = outcome.result.state
        if outcome.result.score is not None:
            dialog.turn_scores.append(outcome.result.score)
        return [] if outcome.result.ends else [{"role": "user", "content": outcome.result.text}]

    def _count_failure(self, what: str, fate: str, why: str) -> None:
        self.counts[fate] += 1
        self.warned[fate] += 1
        if self.warned[fate] <= MAX_WARNINGS:
            log.warning("rollout.multi_turn: a %s failed (%s): %s", what, fate, why)

    def _end(self, number: int, finish_reason: FinishReason) -> None:
        dialog = self._dialogs.pop(number)
        self._results.append(TurnResult(number, None, finish_reason, dialog.num_tool_calls, tuple(dialog.turn_scores)))


def _as_text(message: Message) -> Message:
    """The message with `<image>` for each picture, for the simulated user."""
    return {"role": message["role"], "content": "<image>" * len(message.get("images", ())) + message["content"]}


COUNTS = ("calls", "timeouts", "crashes", "errors", "rejected", "user_failures")


def tool_metrics(handler: TurnHandler) -> dict[str, Metric]:
    """Counts of calls, and the tools' own metrics."""
    found: dict[str, Metric] = {f"tools/{name}": Sum(float(handler.counts[name])) for name in COUNTS}
    for name, values in handler.tool_metrics.items():
        found[f"tools/{name}/mean"] = Mean(sum(values), float(len(values)))
    return found


def turn_metrics(trajectories: Sequence[Trajectory]) -> dict[str, Metric]:
    """Verl's `training/num_turns` (here: turns of the model) and `tool_call_counts`."""
    found: dict[str, Metric] = {}
    names = {"num_turns": "training/num_turns", "tool_call_counts": "tool_call_counts"}
    for name, column in turn_columns(trajectories).items():
        if len(column):
            found[f"{names[name]}/min"] = Min(float(column.min()))
            found[f"{names[name]}/max"] = Max(float(column.max()))
            found[f"{names[name]}/mean"] = Mean(float(column.sum()), float(len(column)))
    return found


def turn_columns(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """Per sample, int32 (N,): turns of the model, and tool calls including failed ones."""
    return {
        "num_turns": np.array([one.num_turns for one in trajectories], np.int32),
        "tool_call_counts": np.array([one.num_tool_calls for one in trajectories], np.int32),
    }


def turns_for_scorer(trajectory: Trajectory) -> dict[str, Any]:
    """Entries of `extra_info` for scorers, as in verl: `num_turns`, and `turn_scores` of a simulated user."""
    return {"num_turns": trajectory.num_turns, "turn_scores": list(trajectory.turn_scores)}
