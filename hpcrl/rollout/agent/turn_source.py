"""The conversations of one generation, as the engine sees them: more requests that come while others are answered."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrl.rollout.agent.conversation import Conversation
from hpcrl.rollout.agent.moderator import Moderator, Verdict
from hpcrl.rollout.protocol import Completion, Request, Trajectory
from hpcrl.runtime.mpi import wait, wait_until

if TYPE_CHECKING:
    from mpi4py import MPI


class TurnSource:
    """One rank's; a `RequestSource`. The leader, rank 0 of `comm`, has the moderator, whose verdicts all ranks get.

    Ranks know alike how many turns wait for a verdict: there is a message per call while some do, of 8 bytes when
    nothing is decided, and none otherwise. `comm` is None where the replica has one rank. `records` are asked for on
    the leader only.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        records: Sequence[dict[str, Any]] | None,
        moderator: Moderator | None,
        comm: MPI.Intracomm | None,
        on_finished: Callable[[int, Trajectory], None] | None = None,
        on_step: Callable[[], None] | None = None,
    ) -> None:
        self.trajectories: dict[int, Trajectory] = {}
        self._conversations = [Conversation(request) for request in requests]
        self._records = records
        self._moderator = moderator
        self._comm = comm
        self._on_finished = on_finished
        self._on_step = on_step
        self._conversation_of = list(range(len(requests)))  # by index of the engine's request
        self._num_waiting = 0

    def turn_ended(self, index: int, done: Completion) -> None:
        """The engine's `on_finished`."""
        number = self._conversation_of[index]
        conversation = self._conversations[number]
        conversation.add_turn(done)
        self._num_waiting += 1
        if self._moderator is not None:
            record = self._records[number] if self._records is not None else {}
            self._moderator.hear(number, conversation, done.token_ids, record)

    def take(self, idle: bool) -> Sequence[Request] | None:
        requests: list[Request] = []
        while self._num_waiting and not requests:
            for verdict in self._agreed(idle):
                requests += self._follow(verdict)
            if not idle:
                break
        if len(self.trajectories) == len(self._conversations):
            return None
        return requests

    def _follow(self, verdict: Verdict) -> list[Request]:
        """The request for the conversation's next turn, if there is one."""
        self._num_waiting -= 1
        number, conversation = verdict.conversation, self._conversations[verdict.conversation]
        if verdict.answer is not None:
            conversation.add_answer(verdict.answer)
            self._conversation_of.append(number)
            return [conversation.next_request()]
        done = conversation.trajectory(verdict.finish_reason, verdict.num_tool_calls, verdict.turn_scores)
        self.trajectories[number] = done
        if self._on_finished is not None:
            self._on_finished(number, done)
        return []

    def _agreed(self, idle: bool) -> list[Verdict]:
        """The leader's verdicts on every rank; waits for the first one if the engine is idle."""
        if self._moderator is None:
            return self._heard()
        verdicts = self._moderator.verdicts()
        if idle and not verdicts:
            verdicts = self._awaited(self._moderator)
        if self._comm is not None:
            self._tell(self._comm, verdicts)
        return verdicts

    def _awaited(self, moderator: Moderator) -> list[Verdict]:
        """Waits for verdicts; scoring goes on meanwhile."""
        verdicts: list[Verdict] = []

        def decided() -> bool:
            if self._on_step is not None:
                self._on_step()
            verdicts.extend(moderator.verdicts())
            return bool(verdicts)

        wait_until(decided)
        return verdicts

    @staticmethod
    def _tell(comm: MPI.Intracomm, verdicts: list[Verdict]) -> None:
        blob = bytearray(pickle.dumps(verdicts) if verdicts else b"")
        wait(comm.Ibcast(np.array([len(blob)], np.int64)))
        if blob:
            wait(comm.Ibcast(blob))

    def _heard(self) -> list[Verdict]:
        assert self._comm is not None
        size = np.zeros(1, np.int64)
        wait(self._comm.Ibcast(size))
        if not size[0]:
            return []
        blob = bytearray(int(size[0]))
        wait(self._comm.Ibcast(blob))
        return pickle.loads(blob)
