"""Turns of a conversation: on the leader of a replica, something answers the model, or ends the conversation.
A `Tally` counts its failures."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from hpcrl.algorithms.metrics import Max, Mean, Metric, Min, Sum
from hpcrl.rollout.environments.conversation import Answer, Conversation
from hpcrl.rollout.environments.environment import Schema
from hpcrl.rollout.environments.turn_template import Message, TurnTemplate
from hpcrl.rollout.protocol import FinishReason, Request, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from hpcrl.config.schema import MultiTurnConfig

Record = Mapping[str, Any]
Info = Mapping[str, "float | str"]
PromptOf = Callable[[str | list[Any] | None, Sequence[Message], "Sequence[Schema] | None"], np.ndarray]


class TurnResult(NamedTuple):
    """What follows a turn of the model: `answer` and another turn; or None, and the conversation has ended with
    `finish_reason`. Of a conversation that begins: `prompt_ids` int32 (n,) of its first turn."""

    conversation: int
    answer: Answer | None
    finish_reason: FinishReason = "stop"
    num_tool_calls: int = 0
    turn_scores: tuple[float, ...] = ()
    prompt_ids: np.ndarray | None = None
    info: Info | None = None  # of an environment

    def next_request(self, conversation: Conversation, features: Sequence[Tensor] = ()) -> Request | None:
        """Append the answer, and return the request for the conversation's next turn; None if it has ended.

        Args:
            features: as in `add_answer`.
        """
        if self.prompt_ids is not None:
            conversation.request = replace(conversation.request, prompt_ids=self.prompt_ids)
        elif self.answer is not None:
            conversation.add_answer(self.answer, features)
        else:
            return None
        return conversation.next_request()

    def trajectory(self, conversation: Conversation) -> Trajectory:
        """Return the conversation that has ended."""
        return conversation.trajectory(self.finish_reason, self.num_tool_calls, self.turn_scores, self.info)


class Reply(NamedTuple):
    """An answer to a turn; without messages it is the last. reward: of the turn. failed: nothing could answer, and the
    sample does not count. info: of an environment; of one that failed, its `error`. state: a number of it before the
    next turn. new_conversation, tools: as in `Step`."""

    messages: Sequence[Message] = ()
    ends: bool = False
    reward: float | None = None
    failed: bool = False
    info: Info | None = None
    state: int = 0
    new_conversation: bool = False
    tools: Sequence[Schema] | None = None


@dataclass
class Dialog:
    """State of a conversation on the leader. turn_end: the last token of the latest turn. over: why that turn is the
    last, if it is. messages: those that the model has read after the prompt of the row; with `is_new`, in its place.
    tools: schemas in its prompt, if they are not those of the row."""

    record: Record
    conversation: Conversation
    messages: list[Message] = field(default_factory=list)
    turn_end: int | None = None
    over: FinishReason | None = None
    num_answers: int = 0
    num_tool_calls: int = 0
    turn_scores: list[float] = field(default_factory=list)
    info: Info | None = None
    state: int = 0  # before the latest turn
    tools: Sequence[Schema] | None = None
    is_new: bool = False

    @property
    def prompt(self) -> str | list[Any] | None:
        """What comes before the messages: the prompt of the row; None: nothing."""
        return None if self.is_new else self.record["prompt"]


class Responder(Protocol):
    """What answers the model. Its calls do not wait."""

    def open(self, number: int, request: Request, dialog: Dialog) -> None:
        """Begin a conversation. An environment's `poll` will return the tokens of its prompt."""

    def begin(self, number: int, dialog: Dialog, text: str) -> bool:
        """Begin the answer to a turn, of which `text` is the model's. False: there is none."""

    def poll(self) -> Iterable[tuple[int, Reply | np.ndarray]]:
        """Return the conversations that have an answer, or the tokens of their prompt."""

    def close(self, number: int, info: Info | None = None) -> None:
        """End a conversation.

        Args:
            info: the environment's last one.
        """

    def end(self) -> None:
        """End all conversations, and wait until they have ended."""

    def reject(self, error: Exception) -> Reply:
        """Fail because the template does not render what was answered, or raise."""

    def metrics(self) -> dict[str, Metric]:
        """Return counts of what was answered since the last call."""


@dataclass(eq=False)
class TurnHandler:
    """Turns of one generation, answered by `responder`. A response has at most `max_tokens`, answers included.

    prompt_of: tokens of a prompt from that of a row, further messages, and schemas of tools.
    """

    cfg: MultiTurnConfig
    responder: Responder
    template: TurnTemplate
    text_of: Callable[[np.ndarray], str]
    max_tokens: int
    prompt_of: PromptOf
    _dialogs: dict[int, Dialog] = field(default_factory=dict, init=False)
    _results: list[TurnResult] = field(default_factory=list, init=False)

    def open(self, number: int, conversation: Conversation, record: Record) -> None:
        """Begin a conversation. Does not wait."""
        dialog = self._dialogs[number] = Dialog(record, conversation)
        self.responder.open(number, conversation.request, dialog)

    def add_turn(self, number: int) -> None:
        """Handle the end of a model's turn, which the conversation has. Does not wait."""
        dialog = self._dialogs[number]
        turn = dialog.conversation.turn_ids()
        text = self.text_of(turn)
        dialog.messages.append({"role": "assistant", "content": text})
        dialog.turn_end = int(turn[-1]) if len(turn) else None
        dialog.over = self._over(dialog)
        if not self.responder.begin(number, dialog, text):
            self._end(number, dialog.over or "stop")

    def poll(self) -> list[TurnResult]:
        """Return the results since the last call. Does not wait."""
        for number, reply in self.responder.poll():
            if isinstance(reply, Reply):
                self._handle(number, self._dialogs[number], reply)
            else:
                self._results.append(TurnResult(number, None, prompt_ids=reply))
        found, self._results = self._results, []
        return found

    def _over(self, dialog: Dialog) -> FinishReason | None:
        """Why the model may write no other turn, if it may not."""
        conversation, answers = dialog.conversation, self.cfg.max_user_turns
        if conversation.finish_reason not in ("stop", None):
            return conversation.finish_reason
        if self.cfg.max_assistant_turns is not None and conversation.num_turns >= self.cfg.max_assistant_turns:
            return "stop"
        if answers is not None and dialog.num_answers >= answers:
            return "stop"
        return "length" if conversation.num_tokens >= self.max_tokens else None

    def _handle(self, number: int, dialog: Dialog, reply: Reply) -> None:
        dialog.info = reply.info if reply.info is not None else dialog.info
        if reply.reward is not None:
            dialog.conversation.add_reward(reply.reward, dialog.state)
            dialog.turn_scores.append(reply.reward)
        dialog.state = reply.state
        if reply.failed:
            self._end(number, "error")
        elif reply.ends or not reply.messages or dialog.over is not None:
            self._end(number, "stop" if reply.ends else dialog.over or "stop")
        else:
            self._answer(number, dialog, reply)

    def _answer(self, number: int, dialog: Dialog, reply: Reply) -> None:
        limit, side = self.cfg.max_tool_response_length, self.cfg.tool_response_truncate_side
        shortened = [
            it | {"content": self.template.shortened(it["content"], limit, side)} if it["role"] == "tool" else it
            for it in reply.messages
        ]
        try:
            answer = self._answer_of(dialog, reply, shortened)
        except Exception as error:  # a template may raise for roles and their order
            self._handle(number, dialog, self.responder.reject(error))
            return
        if dialog.conversation.num_tokens + len(answer.token_ids) >= self.max_tokens:  # no room for the model
            self._end(number, "length")
            return
        dialog.messages += map(_as_text, shortened)
        dialog.num_answers += 1
        self._results.append(TurnResult(number, answer))

    def _answer_of(self, dialog: Dialog, reply: Reply, messages: Sequence[Message]) -> Answer:
        """The answer after the tokens so far, or a prompt in their place: that of a new conversation, or what the
        template makes of this one."""
        if reply.new_conversation:
            dialog.messages, dialog.is_new = [], True
            dialog.tools = dialog.tools if reply.tools is None else reply.tools
            return Answer(self.prompt_of(dialog.prompt, messages, dialog.tools), is_prompt=True)
        answer = self.template.answer(messages, dialog.turn_end)
        if not self.cfg.template_history or isinstance(dialog.prompt, str) or self._has_marks(dialog):
            return answer
        rendered = self.prompt_of(dialog.prompt, [*dialog.messages, *messages], dialog.tools)
        read = np.concatenate([dialog.conversation.context_ids(), answer.token_ids])
        return answer if self.template.same_text(read, rendered) else Answer(rendered, is_prompt=True)

    def _has_marks(self, dialog: Dialog) -> bool:
        """Whether the model wrote special tokens, such as those of tool calls, which are not rendered from text."""
        texts = [it["content"] for it in dialog.messages if it["role"] == "assistant"]
        return any(self.template.clean(text) != text for text in texts)

    def _end(self, number: int, finish_reason: FinishReason) -> None:
        dialog = self._dialogs.pop(number)
        self.responder.close(number, dialog.info)
        counted = dialog.num_tool_calls, tuple(dialog.turn_scores)
        self._results.append(TurnResult(number, None, finish_reason, *counted, info=dialog.info))


def _as_text(message: Message) -> Message:
    """The message with `<image>` for each picture, for the simulated user."""
    content = "<image>" * len(message.get("images", ())) + message["content"]
    return {key: it for key, it in message.items() if key != "images"} | {"content": content}


def turn_metrics(trajectories: Sequence[Trajectory]) -> dict[str, Metric]:
    """Verl's `training/num_turns` (here: turns of the model) and `tool_call_counts`, and the number of sequences."""
    metrics: dict[str, Metric] = {}
    names = {"num_turns": "training/num_turns", "num_sequences": "training/num_sequences"}
    columns = turn_columns(trajectories)
    columns["num_sequences"] = np.array([it.num_sequences for it in trajectories])
    for name, column in columns.items():
        if len(column):
            key = names.get(name, name)
            metrics[f"{key}/min"] = Min(float(column.min()))
            metrics[f"{key}/max"] = Max(float(column.max()))
            metrics[f"{key}/mean"] = Mean(float(column.sum()), float(len(column)))
    return metrics


def turn_columns(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """Per sample, int32 (N,): turns of the model, and tool calls including failed ones."""
    return {
        "num_turns": np.array([one.num_turns for one in trajectories], np.int32),
        "tool_call_counts": np.array([one.num_tool_calls for one in trajectories], np.int32),
    }


def turns_for_scorer(trajectory: Trajectory) -> dict[str, Any]:
    """Entries of `extra_info` for scorers, as in verl: `num_turns`, and `turn_scores` of a simulated user."""
    return {"num_turns": trajectory.num_turns, "turn_scores": list(trajectory.turn_scores)}


log = logging.getLogger(__name__)

MAX_WARNINGS = 3  # log lines of a job per kind of failure; metrics count all of them


@dataclass
class Tally:
    """section: of metrics. names: counts that are metrics also if they are 0. warned: failures by kind, also of earlier
    generations."""

    section: str
    names: Sequence[str]
    warned: Counter[str]
    counts: Counter[str] = field(default_factory=Counter, init=False)
    _values: dict[str, list[float]] = field(default_factory=dict, init=False)

    def note(self, name: str, value: float) -> None:
        """Add a value to those of which the metric is the mean."""
        self._values.setdefault(name, []).append(value)

    def fail(self, kind: str, line: str) -> None:
        """Count a failure, and log the line if it is one of the first of this kind."""
        self.counts[kind] += 1
        self.warned[kind] += 1
        if self.warned[kind] <= MAX_WARNINGS:
            log.warning("%s", line)

    def metrics(self) -> dict[str, Metric]:
        """Return the counts and means since the last call."""
        found: dict[str, Metric] = {f"{self.section}/{name}": Sum(float(self.counts[name])) for name in self.names}
        for name, values in self._values.items():
            found[f"{self.section}/{name}/mean"] = Mean(sum(values), float(len(values)))
        self.counts.clear()
        self._values.clear()
        return found
