"""A response in turns, from completions."""

from __future__ import annotations

import numpy as np

from hpcrl.rollout.environments.conversation import Answer, Conversation
from hpcrl.rollout.protocol import Completion, Request


def turn(length: int, num_run: int, expert: int) -> Completion:
    """Of a model whose tokens all go to one expert at a time."""
    experts = np.full((num_run, 2), expert, np.int16)
    return Completion(np.full(length, 7, np.int32), np.zeros(length, np.float32), "stop", experts)


def test_a_token_keeps_the_experts_of_its_first_run() -> None:
    """The second turn runs the whole context again: 2 tokens of the prompt, 3 of the first turn, 2 of the answer."""
    conversation = Conversation(Request([5, 6], "a:0:0"))
    conversation.add_turn(turn(3, num_run=2 + 3 - 1, expert=0))
    conversation.add_answer(Answer(np.array([8, 9], np.int32)))
    conversation.add_turn(turn(1, num_run=2 + 3 + 2 + 1 - 1, expert=1))
    done = conversation.trajectory("stop", 1, ())
    assert done.routed_experts is not None
    assert done.routed_experts[:, 0].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert done.token_ids.tolist() == [7, 7, 7, 8, 9, 7]
