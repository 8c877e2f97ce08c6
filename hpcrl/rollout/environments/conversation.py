"""Conversations of several turns: responses that the model writes between what it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from hpcrl.rollout.protocol import (
    Completion,
    FinishReason,
    Prefill,
    PromptPicture,
    Request,
    ToolPicture,
    Trajectory,
    merge_routed_experts,
)

if TYPE_CHECKING:
    from torch import Tensor


State: TypeAlias = dict[str, Any]  # JSON values


class Interaction(Protocol):
    """Interface of the class `rollout.multi_turn.interaction_name` in the file `interaction_path`.

    Objects are made without arguments, one in each tool process, and serve any conversation: everything about a
    conversation is in its `state`, which is sent along as JSON. So conversations survive the death of a process.
    """

    def start(self, record: dict[str, Any]) -> State:
        """Return the state of a new conversation; `record` has data_source, ground_truth, extra_info, ability and
        prompt."""

    def respond(self, state: State, messages: list[dict[str, str]]) -> tuple[bool, str, float | None]:
        """Return (whether the conversation ends here, the user's text if not, a score of this turn or None).

        `messages` are {role, content} of the response so far, the model's latest turn last. `state` may be changed.
        """


@dataclass(frozen=True, eq=False)
class Answer:
    """What the model reads between two of its turns. token_ids: int32 (n,). pictures: their places count from the first
    of these tokens. is_prompt: the tokens are the prompt of a new sequence, which the tokens before are not part of."""

    token_ids: np.ndarray
    pictures: tuple[ToolPicture, ...] = ()
    is_prompt: bool = False


@dataclass(eq=False)
class Conversation:
    """A response in turns, and in one sequence or several, each of which has a prompt and turns. `request` is that of
    its first turn. Drawn tokens are never decoded and encoded again. A turn may be drawn in parts."""

    request: Request
    num_turns: int = 0  # of the model
    num_tokens: int = 0  # of the response so far
    finish_reason: FinishReason | None = None  # of the latest turn; "abort": it continues
    _pictures: list[ToolPicture] = field(default_factory=list)
    _encoded: list[PromptPicture] = field(default_factory=list)  # the same
    _routed_experts: np.ndarray | None = None
    _prefill: Prefill = Prefill()
    _token_ids: list[np.ndarray] = field(default_factory=list)
    _log_probs: list[np.ndarray] = field(default_factory=list)
    _masks: list[np.ndarray] = field(default_factory=list)
    _rewards: dict[int, tuple[float, int]] = field(default_factory=dict)  # with states, by place of the token
    _starts: list[int] = field(default_factory=list)  # of sequences after the first, by place of the token
    _prompt_end: int = 0  # of the latest sequence's prompt in the response
    _turn_start: int = 0  # of the latest turn

    @property
    def usage(self) -> tuple[int, int]:
        """Tokens that the model had read before its latest turn, and those of the turn."""
        start = self._starts[-1] if self._starts else -len(self.request.prompt_ids)
        return self._turn_start - start, self.num_tokens - self._turn_start

    def add_turn(self, done: Completion) -> None:
        """Append tokens that the model wrote: a turn, or a part of one."""
        if self.finish_reason != "abort":
            self._turn_start = self.num_tokens
        self._add(done.token_ids, done.log_probs, 1)
        before = len(self.request.prompt_ids) + self._starts[-1] if self._starts else 0
        self._routed_experts = merge_routed_experts(self._routed_experts, done.routed_experts, before)
        self._prefill = self._prefill.plus(done.prefill)
        self.finish_reason = done.finish_reason
        self.num_turns += done.finish_reason != "abort"

    def turn_ids(self) -> np.ndarray:
        """Return the tokens of the latest turn, int32 (n,)."""
        return self._tokens()[self._turn_start :]

    def add_reward(self, reward: float, state: int) -> None:
        """Put the reward of the latest turn, and the number of the state before it, on its last token."""
        if self.num_tokens:
            self._rewards[self.num_tokens - 1] = reward, state

    def add_answer(self, answer: Answer, features: Sequence[Tensor] = ()) -> None:
        """Append an answer.

        Args:
            features: fp32 (tokens, width) of each of its pictures.
        """
        first = len(self.request.prompt_ids) + self.num_tokens
        for picture, its_features in zip(answer.pictures, features, strict=True):
            place = picture.place._replace(start=first + picture.place.start)
            self._pictures.append(replace(picture, place=place))
            self._encoded.append(PromptPicture(picture.key, place, its_features))
        if answer.is_prompt:
            self._starts.append(self.num_tokens)
        self._add(answer.token_ids, np.zeros(len(answer.token_ids), np.float32), 0)
        if answer.is_prompt:
            self._prompt_end = self.num_tokens

    def context_ids(self) -> np.ndarray:
        """Return the tokens of the latest sequence, int32 (n,)."""
        request = self.next_request()
        return np.concatenate([request.prompt_ids, request.prefix_ids])

    def next_request(self) -> Request:
        """Return the request for the model's next turn."""
        tokens, pictures = self._tokens(), (*self.request.pictures, *self._encoded)
        prompt = tokens[self._starts[-1] : self._prompt_end] if self._starts else self.request.prompt_ids
        prefix, before = tokens[self._prompt_end :], self._prompt_end
        return replace(self.request, prompt_ids=prompt, prefix_ids=prefix, pictures=pictures, num_before=before)

    def trajectory(
        self,
        finish_reason: FinishReason,
        num_tool_calls: int = 0,
        turn_scores: tuple[float, ...] = (),
        info: Mapping[str, float | str] | None = None,
    ) -> Trajectory:
        """Return the whole. One that failed has no token that counts, and a token of its prompt if it has no other.
        Without an `info` there is no environment."""
        if not self.num_tokens:
            self._add(np.asarray(self.request.prompt_ids[-1:], np.int32), np.zeros(1, np.float32), 0)
        has_failed = finish_reason == "error"
        rewards = states = None
        if self._rewards and not has_failed:
            rewards, states = np.zeros(self.num_tokens, np.float32), np.zeros(self.num_tokens, np.int32)
            for place, (reward, state) in self._rewards.items():
                rewards[place], states[place] = reward, state
        return Trajectory(
            self._tokens(),
            np.concatenate(self._log_probs) * np.float32(not has_failed),
            np.concatenate(self._masks) * np.int32(not has_failed),
            finish_reason,
            self.num_turns,
            num_tool_calls,
            turn_scores,
            self._routed_experts,
            tuple(self._pictures),
            self.request.prompt_ids if info is not None else None,
            rewards,
            states,
            info,
            self._prefill,
            np.array(self._starts, np.int32) + np.int32(len(self.request.prompt_ids)) if self._starts else None,
        )

    def _tokens(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.int32), *self._token_ids])

    def _add(self, token_ids: np.ndarray, log_probs: np.ndarray, mask: int) -> None:
        self._token_ids.append(token_ids)
        self._log_probs.append(log_probs)
        self._masks.append(np.full(len(token_ids), mask, np.int32))
        self.num_tokens += len(token_ids)
