"""Tools and a simulated user as what answers the model. They keep nothing between calls, so any process may run one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpcrl.algorithms.metrics import Metric
from hpcrl.rollout.environments.environment import Schema
from hpcrl.rollout.environments.tool_worker import ToolAnswer
from hpcrl.rollout.environments.tools import BadCall, Call, Parser, parsed
from hpcrl.rollout.environments.turn_handler import Dialog, Info, Reply, Tally
from hpcrl.rollout.environments.turn_template import Message
from hpcrl.rollout.protocol import Request
from hpcrl.sandbox.process_pool import ProcessPool
from hpcrl.sandbox.worker import Outcome

if TYPE_CHECKING:
    from hpcrl.config.schema import MultiTurnConfig

MAX_NAME = 80  # characters of a name or an id that the model wrote
TOOL_COUNTS = ("calls", "timeouts", "crashes", "errors", "rejected", "user_failures")


@dataclass
class _Pending:
    """What has been asked of processes for one turn. asked: numbers of the pool's requests, or error texts of calls
    that reach no tool. calls: of the model; none: the simulated user is asked."""

    dialog: Dialog
    calls: Sequence[Call]
    asked: list[int | str]


@dataclass(eq=False)
class ToolResponder:
    """`pool` runs an AgentSource. The answer of a failed call is its error; a failed user ends the conversation.
    schemas: of the tools.

    tally: all tool calls, those that timed out, crashed, raised, or reached no tool, and failed users.
    """

    cfg: MultiTurnConfig
    pool: ProcessPool
    parser: Parser
    tally: Tally
    schemas: Sequence[Schema] | None = None
    _states: dict[int, str] = field(default_factory=dict, init=False)  # of the simulated user, JSON
    _pending: dict[int, _Pending] = field(default_factory=dict, init=False)  # in order

    def open(self, number: int, request: Request, dialog: Dialog) -> None:
        dialog.tools = self.schemas

    def begin(self, number: int, dialog: Dialog, text: str) -> bool:
        """Start the tool calls of the turn, or the user's."""
        is_full = dialog.over == "length" and dialog.conversation.finish_reason == "stop"
        if dialog.over is not None and not is_full:
            return False
        calls = self._calls(text)
        if is_full:
            dialog.over = "length" if calls else "stop"  # no room for the answer to a call
            return False
        if calls:
            asked: list[int | str] = [self._begin(call, dialog) for call in calls]
        elif self.cfg.interaction_path is not None:
            state = self._states.get(number)
            messages = [{key: message[key] for key in ("role", "content")} for message in dialog.messages]
            asked = [self.pool.submit({"state": state, "record": dialog.record, "messages": messages})]
        else:
            return False
        self._pending[number] = _Pending(dialog, calls, asked)
        return True

    def poll(self) -> Iterator[tuple[int, Reply]]:
        self.pool.pump()
        for number in [number for number, it in self._pending.items() if self._is_answered(it)]:
            pending = self._pending.pop(number)
            outcomes = [it if isinstance(it, str) else self.pool.take(it) for it in pending.asked]
            if pending.calls:
                pairs = zip(pending.calls, outcomes, strict=True)
                yield number, Reply([self._message(call, found) for call, found in pairs])
            else:
                yield number, self._user_reply(number, outcomes[0])

    def close(self, number: int, info: Info | None = None) -> None:
        self._states.pop(number, None)
        self._pending.pop(number, None)

    def end(self) -> None:
        pass

    def reject(self, error: Exception) -> Reply:
        raise error

    def metrics(self) -> dict[str, Metric]:
        """Return counts of calls, and the tools' own metrics, since the last call."""
        return self.tally.metrics()

    def _calls(self, text: str) -> Sequence[Call]:
        if self.cfg.function_tool_path is None:
            return []
        return parsed(self.parser, text, self.cfg.max_parallel_calls)

    def _begin(self, call: Call, dialog: Dialog) -> int | str:
        self.tally.counts["calls"] += 1
        dialog.num_tool_calls += 1
        if isinstance(call, BadCall):
            self.tally.counts["rejected"] += 1
            return f"error: {call.why}"
        request = {"tool": call.name, "arguments": call.arguments, "is_text": call.is_text, "record": dialog.record}
        return self.pool.submit(request)

    def _is_answered(self, pending: _Pending) -> bool:
        return all(isinstance(it, str) or self.pool.has(it) for it in pending.asked)

    def _message(self, call: Call, outcome: Outcome | str) -> Message:
        text, images = (outcome, ()) if isinstance(outcome, str) else self._answer(outcome)
        names = {"name": call.name[:MAX_NAME], "tool_call_id": (call.id or "")[:MAX_NAME]}
        message: dict[str, Any] = {"role": "tool", "content": text, "images": images}
        return message | {key: name for key, name in names.items() if name}

    def _answer(self, outcome: Outcome) -> tuple[str, tuple[bytes, ...]]:
        """Text and pictures."""
        if outcome.fate != "ok":
            line = f"rollout.multi_turn: a call of a tool failed ({outcome.fate}): {outcome.why}"
            self.tally.fail(outcome.fate, line)
            return f"error: {outcome.result or outcome.why}", ()
        answer: ToolAnswer = outcome.result
        for name, value in answer.metrics.items():
            self.tally.note(name, value)
        self.tally.counts["rejected"] += answer.rejected
        return f"error: {answer.text}" if answer.rejected else answer.text, answer.images

    def _user_reply(self, number: int, outcome: Outcome | str) -> Reply:
        assert isinstance(outcome, Outcome)
        if outcome.fate != "ok":
            line = f"rollout.multi_turn: a user failed (user_failures): {outcome.fate}: {outcome.why}"
            self.tally.fail("user_failures", line)
            return Reply(ends=True)
        self._states[number] = outcome.result.state
        messages = [] if outcome.result.ends else [{"role": "user", "content": outcome.result.text}]
        return Reply(messages, outcome.result.ends, outcome.result.score)
