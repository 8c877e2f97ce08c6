"""A simulated user, who answers the model's turns."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

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
