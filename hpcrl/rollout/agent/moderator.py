"""Turns of a conversation: on the leader of a replica, tools and users answer the model, or end the conversation."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcrl.algorithms.metrics import Max, Mean, Metric, Min, Sum
from hpcrl.rollout.agent.conversation import Conversation
from hpcrl.rollout.agent.tool_worker import ToolAnswer
from hpcrl.rollout.agent.tools import BadCall, Call, Parser
from hpcrl.rollout.agent.turn_template import Message, TurnTemplate
from hpcrl.rollout.protocol import FinishReason, Trajectory
from hpcrl.sandbox.process_pool import ProcessPool
from hpcrl.sandbox.worker import Outcome

if TYPE_CHECKING:
    from hpcrl.config.schema import MultiTurnConfig


log = logging.getLogger(__name__)

WARNINGS = 3  # lines of a job that say why, for each way to fail: models make mistakes, and metrics count them

Record = Mapping[str, Any]


class Verdict(NamedTuple):
    """What follows a turn of the model: `answer`, int32 (n,), and another turn; or None, and the conversation is over
    for `finish_reason`."""

    conversation: int
    answer: np.ndarray | None
    finish_reason: FinishReason = "stop"
    num_tool_calls: int = 0
    turn_scores: tuple[float, ...] = ()


@dataclass
class _Exchange:
    """What only the moderator knows of a conversation. `asked`: numbers of requests under way, or, of calls that reach
    no tool, why."""

    record: Record
    conversation: Conversation
    messages: list[Message] = field(default_factory=list)
    asked: list[int | str] = field(default_factory=list)
    calls_tools: bool = False  # or asks the user
    num_answers: int = 0
    num_tool_calls: int = 0
    turn_scores: list[float] = field(default_factory=list)
    state: str | None = None  # of the simulated user, JSON


class Moderator:
    """Of one generation. `pool` runs an AgentSource. A response has at most `most_tokens`, answers included.

    A call that fails is answered by what went wrong; a user who fails ends the conversation. `counts` are of tool
    calls: all, those that timed out, crashed, raised, and those that reached no tool; and of failed users. `warned`
    counts warnings of earlier generations too.
    """

    def __init__(
        self,
        cfg: MultiTurnConfig,
        pool: ProcessPool,
        parser: Parser,
        template: TurnTemplate,
        text_of: Callable[[np.ndarray], str],
        most_tokens: int,
        warned: Counter[str],
    ) -> None:
        self._warned = warned
        self.counts: Counter[str] = Counter()
        self.tool_metrics: dict[str, list[float]] = {}
        self._cfg = cfg
        self._pool = pool
        self._parser = parser
        self._template = template
        self._text_of = text_of
        self._most_tokens = most_tokens
        self._exchanges: dict[int, _Exchange] = {}
        self._waiting: dict[int, None] = {}  # conversations whose answer is under way, in order
        self._verdicts: list[Verdict] = []

    def hear(self, number: int, conversation: Conversation, turn: np.ndarray, record: Record) -> None:
        """The model's turn in a conversation has ended. Does not wait."""
        exchange = self._exchanges.setdefault(number, _Exchange(record, conversation))
        text = self._text_of(turn)
        exchange.messages.append({"role": "assistant", "content": text})
        if conversation.finish_reason not in ("stop", None):
            self._end(number, conversation.finish_reason)
        elif not self._may_answer(exchange):
            self._end(number, "stop")
        elif conversation.num_tokens >= self._most_tokens:
            self._end(number, "length" if self._tool_calls(text) else "stop")  # no room for the answer to a call
        elif self._ask(exchange, text):
            self._waiting[number] = None
        else:
            self._end(number, "stop")

    def verdicts(self) -> list[Verdict]:
        """What has been decided since the last call. Does not wait."""
        self._pool.pump()
        for number in [number for number in self._waiting if self._is_answered(self._exchanges[number])]:
            del self._waiting[number]
            self._settle(number, self._exchanges[number])
        found, self._verdicts = self._verdicts, []
        return found

    def _may_answer(self, exchange: _Exchange) -> bool:
        turns, answers = self._cfg.max_assistant_turns, self._cfg.max_user_turns
        return (turns is None or exchange.conversation.num_turns < turns) and (
            answers is None or exchange.num_answers < answers
        )

    def _ask(self, exchange: _Exchange, text: str) -> bool:
        """Asks the tools that the turn calls, or the user; whether anybody was asked."""
        calls = self._tool_calls(text)
        if calls:
            exchange.calls_tools = True
            exchange.asked = [self._begin(call, exchange) for call in calls]
        elif self._cfg.interaction_path is not None:
            exchange.calls_tools = False
            asked = {"state": exchange.state, "record": exchange.record, "messages": exchange.messages}
            exchange.asked = [self._pool.submit(asked)]
        return bool(exchange.asked)

    def _tool_calls(self, text: str) -> Sequence[Call]:
        if self._cfg.function_tool_path is None:
            return []
        try:
            calls = list(self._parser(text) or ())[: self._cfg.max_parallel_calls]
            for call in calls:
                if not isinstance(call, Call):
                    raise TypeError(f"the parser gave a {type(call).__name__}; expected a ToolCall or a BadCall")
            return calls
        except Exception as error:  # a parser may be the user's, and its text is the model's
            return [BadCall(f"{type(error).__name__}: {error}")]

    def _begin(self, call: Call, exchange: _Exchange) -> int | str:
        self.counts["calls"] += 1
        exchange.num_tool_calls += 1
        if isinstance(call, BadCall):
            self.counts["rejected"] += 1
            return f"error: {call.why}"
        return self._pool.submit({"tool": call.name, "arguments": call.arguments, "record": exchange.record})

    def _is_answered(self, exchange: _Exchange) -> bool:
        return all(isinstance(asked, str) or self._pool.has(asked) for asked in exchange.asked)

    def _settle(self, number: int, exchange: _Exchange) -> None:
        """Everybody who was asked has answered."""
        outcomes = [asked if isinstance(asked, str) else self._pool.take(asked) for asked in exchange.asked]
        exchange.asked = []
        if exchange.calls_tools:
            answers = [self._tool_message(found) for found in outcomes]
        else:
            answers = self._user_messages(exchange, outcomes[0])
        if not answers:
            self._end(number, "stop")
            return
        tokens = self._template.tokens(answers)
        if exchange.conversation.num_tokens + len(tokens) >= self._most_tokens:  # no room for a word of the model
            self._end(number, "length")
            return
        exchange.messages += answers
        exchange.num_answers += 1
        self._verdicts.append(Verdict(number, tokens))

    def _tool_message(self, outcome: Outcome | str) -> Message:
        text = outcome if isinstance(outcome, str) else self._tool_text(outcome)
        limit, side = self._cfg.max_tool_response_length, self._cfg.tool_response_truncate_side
        return {"role": "tool", "content": self._template.shortened(text, limit, side)}

    def _tool_text(self, outcome: Outcome) -> str:
        if outcome.fate != "ok":
            self._count_failure("call of a tool", outcome.fate, outcome.why)
            return f"error: {outcome.result or outcome.why}"
        answer: ToolAnswer = outcome.result
        for name, value in answer.metrics.items():
            self.tool_metrics.setdefault(name, []).append(value)
        self.counts["rejected"] += answer.rejected
        return f"error: {answer.text}" if answer.rejected else answer.text

    def _user_messages(self, exchange: _Exchange, outcome: Outcome | str) -> list[Message]:
        """What the simulated user says; nothing ends the conversation."""
        assert isinstance(outcome, Outcome)
        if outcome.fate != "ok":
            self._count_failure("user", "user_failures", f"{outcome.fate}: {outcome.why}")
            return []
        exchange.state = outcome.result.state
        if outcome.result.score is not None:
            exchange.turn_scores.append(outcome.result.score)
        return [] if outcome.result.ends else [{"role": "user", "content": outcome.result.text}]

    def _count_failure(self, what: str, fate: str, why: str) -> None:
        self.counts[fate] += 1
        self._warned[fate] += 1
        if self._warned[fate] <= WARNINGS:
            log.warning("rollout.multi_turn: a %s failed (%s): %s", what, fate, why)

    def _end(self, number: int, finish_reason: FinishReason) -> None:
        exchange = self._exchanges.pop(number)
        self._verdicts.append(
            Verdict(number, None, finish_reason, exchange.num_tool_calls, tuple(exchange.turn_scores))
        )


COUNTS = ("calls", "timeouts", "crashes", "errors", "rejected", "user_failures")


def tool_metrics(moderator: Moderator) -> dict[str, Metric]:
    """How calls went, and what tools measured."""
    found: dict[str, Metric] = {f"tools/{name}": Sum(float(moderator.counts[name])) for name in COUNTS}
    for name, values in moderator.tool_metrics.items():
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
    """Per sample, int32 (N,): turns of the model, and calls of tools, those that failed too."""
    return {
        "num_turns": np.array([one.num_turns for one in trajectories], np.int32),
        "tool_call_counts": np.array([one.num_tool_calls for one in trajectories], np.int32),
    }


def turns_for_scorer(trajectory: Trajectory) -> dict[str, Any]:
    """What a scorer finds in `extra_info`, as verl's do: `num_turns`, and `turn_scores` of a simulated user."""
    return {"num_turns": trajectory.num_turns, "turn_scores": list(trajectory.turn_scores)}
