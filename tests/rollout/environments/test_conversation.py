"""A response in turns, from completions."""

from __future__ import annotations

import numpy as np

from hpcrl.batch.data_proto import NOT_RECORDED
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


def part(length: int, num_run: int, expert: int) -> Completion:
    done = turn(length, num_run, expert)
    return Completion(done.token_ids, done.log_probs, "abort", done.routed_experts)


def test_a_turn_in_parts_after_the_prompt_of_a_new_sequence() -> None:
    """Requests and experts are those of the new sequence, positions those of the response; the last token of the first
    sequence was never run. Rewards are on turns, not on parts."""
    conversation = Conversation(Request([5, 6], "a:0:0"))
    conversation.add_turn(turn(3, num_run=2 + 3 - 1, expert=0))
    conversation.add_answer(Answer(np.array([8, 9], np.int32), is_prompt=True))
    assert conversation.next_request().position == 5
    conversation.add_turn(part(2, num_run=2 + 2 - 1, expert=1))
    request = conversation.next_request()
    assert (list(request.prompt_ids), request.prefix_ids.tolist(), request.position) == ([8, 9], [7, 7], 7)
    conversation.add_turn(turn(1, num_run=2 + 3 - 1, expert=2))
    assert conversation.turn_ids().tolist() == [7, 7, 7] and conversation.num_turns == 2
    conversation.add_reward(1.0, 3)
    done = conversation.trajectory("stop")
    assert done.routed_experts is not None and done.rewards is not None and done.sequence_starts is not None
    assert done.routed_experts[:, 0].tolist() == [0, 0, 0, 0, NOT_RECORDED, 1, 1, 1, 2]
    assert done.mask.tolist() == [1, 1, 1, 0, 0, 1, 1, 1] and done.sequence_starts.tolist() == [5]
    assert done.rewards.tolist() == [0, 0, 0, 0, 0, 0, 0, 1]
