"""A response that the model and tools or a simulated user write in turns: tokens in, tokens out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from hpcrl.rollout.protocol import Completion, FinishReason, Request, Trajectory, known_first

State: TypeAlias = dict[str, Any]  # JSON values


class Interaction(Protocol):
    """What the class `rollout.multi_turn.interaction_name` of the file `interaction_path` has.

    Objects are made without arguments, one in each tool process, and answer any conversation: what is to be known of
    one later goes into its `state`, which travels with it as JSON. So a process that dies takes no conversation along.
    """

    def start(self, record: dict[str, Any]) -> State:
        """The state of a new conversation; `record` has data_source, ground_truth, extra_info, ability and prompt."""
        ...

    def respond(self, state: State, messages: list[dict[str, str]]) -> tuple[bool, str, float | None]:
        """(whether the conversation ends here, what the user says otherwise, a score of this turn or None).

        `messages` are {role, content} of the response so far, the model's latest turn last. `state` may be changed.
        """
        ...


@dataclass(eq=False)
class Conversation:
    """`request` asked for its first turn. What the model drew is kept as it is, never decoded and encoded again."""

    request: Request
    num_turns: int = 0  # of the model
    num_tokens: int = 0  # of the response so far
    finish_reason: FinishReason | None = None  # of the latest turn
    _routed_experts: np.ndarray | None = None
    _token_ids: list[np.ndarray] = field(default_factory=list)
    _log_probs: list[np.ndarray] = field(default_factory=list)
    _masks: list[np.ndarray] = field(default_factory=list)

    def add_turn(self, done: Completion) -> None:
        """Tokens that the model wrote."""
        self._add(done.token_ids, done.log_probs, 1)
        self._routed_experts = known_first(self._routed_experts, done.routed_experts)
        self.finish_reason = done.finish_reason
        self.num_turns += 1

    def add_answer(self, token_ids: np.ndarray) -> None:
        """Tokens that others wrote, int32 (n,)."""
        self._add(token_ids, np.zeros(len(token_ids), np.float32), 0)

    def next_request(self) -> Request:
        """Asks for the model's next turn, behind all that is there."""
        return replace(self.request, prefix_ids=np.concatenate(self._token_ids))

    def trajectory(
        self, finish_reason: FinishReason, num_tool_calls: int, turn_scores: tuple[float, ...]
    ) -> Trajectory:
        return Trajectory(
            np.concatenate(self._token_ids),
            np.concatenate(self._log_probs),
            np.concatenate(self._masks),
            finish_reason,
            self.num_turns,
            num_tool_calls,
            turn_scores,
            self._routed_experts,
        )

    def _add(self, token_ids: np.ndarray, log_probs: np.ndarray, mask: int) -> None:
        self._token_ids.append(token_ids)
        self._log_probs.append(log_probs)
        self._masks.append(np.full(len(token_ids), mask, np.int32))
        self.num_tokens += len(token_ids)
