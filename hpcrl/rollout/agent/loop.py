"""Multi-turn generation: the model calls tools or talks with a simulated user, and continues in the same response."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrl.algorithms.metrics import Metric
from hpcrl.rollout.agent.conversation import Conversation
from hpcrl.rollout.agent.moderator import Moderator, Verdict, tool_metrics
from hpcrl.rollout.agent.tool_worker import AgentSource
from hpcrl.rollout.agent.tools import tool_parser, tool_schemas
from hpcrl.rollout.agent.turn_template import TurnTemplate
from hpcrl.rollout.protocol import Completion, Request, RolloutEngine, SamplingParams, Trajectory
from hpcrl.runtime.mpi import wait, wait_until
from hpcrl.sandbox.process_pool import ProcessPool

if TYPE_CHECKING:
    from mpi4py import MPI
    from transformers import PreTrainedTokenizerBase

    from hpcrl.config.schema import DataConfig, MultiTurnConfig


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


class AgentLoop:
    """One rank's, of a replica whose ranks are `comm` (None: one rank); its rank 0 is the leader and has the tools.

    Turns end when the model writes its end-of-sequence token. What the model draws is a matter of its weights, its
    random numbers and the answers; but when an answer comes, and so which sequences are computed together, is a matter
    of time: repeated runs agree up to rounding, and bitwise under rollout.exact.
    """

    def __init__(
        self,
        cfg: MultiTurnConfig,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        comm: MPI.Intracomm | None = None,
        log_path: str | None = None,
    ) -> None:
        """`log_path`: file for what tools print; None drops it. InputError where the user's files are of no use."""
        self._cfg = cfg
        self._tokenizer = tokenizer
        self._comm = comm if comm is not None and comm.size > 1 else None
        self._pool: ProcessPool | None = None
        self._warned: Counter[str] = Counter()
        if self._comm is not None and self._comm.rank > 0:
            return
        if cfg.function_tool_path is not None:
            tool_schemas(cfg.function_tool_path)  # the file may register a parser
        self._parser = tool_parser(cfg.format)
        self._template = TurnTemplate(tokenizer, data)
        source = AgentSource(cfg.function_tool_path, cfg.interaction_path, cfg.interaction_name)
        self._pool = ProcessPool(source, cfg.num_tool_workers, cfg.tool_timeout, log_path=log_path)

    def run(
        self,
        engine: RolloutEngine,
        requests: Sequence[Request],
        records: Sequence[dict[str, Any]] | None,
        sampling: SamplingParams,
        *,
        seed: int,
        step: int,
        on_finished: Callable[[int, Trajectory], None] | None = None,
        on_step: Callable[[], None] | None = None,
    ) -> tuple[list[Trajectory], dict[str, Metric]]:
        """One trajectory per request, in their order, on every rank of the replica; on the leader metrics of tools.

        `records`, for the leader, are what tools and users may know of each request's row
        (`PromptDataset.record`). A trajectory has at most sampling.max_new_tokens, answers included, and ends with a
        token of the model. `on_finished(index of the request, trajectory)` and `on_step()` must not wait.
        """
        moderator = None
        if self._pool is not None:
            moderator = Moderator(
                self._cfg,
                self._pool,
                self._parser,
                self._template,
                lambda turn: self._text(turn, sampling.eos_token_ids),
                sampling.max_new_tokens,
                self._warned,
            )
        source = TurnSource(requests, records, moderator, self._comm, on_finished, on_step)
        engine.generate(
            requests, sampling, seed=seed, step=step, source=source, on_finished=source.turn_ended, on_step=on_step
        )
        trajectories = [source.trajectories[number] for number in range(len(requests))]
        return trajectories, tool_metrics(moderator) if moderator is not None else {}

    def close(self) -> None:
        """Ends the tool processes. Harmless when called twice."""
        if self._pool is not None:
            self._pool.close()

    def _text(self, turn: np.ndarray, eos_token_ids: tuple[int, ...]) -> str:
        """A turn without the token that ended it; other special tokens stay and show."""
        ids = turn.tolist()
        if ids and ids[-1] in eos_token_ids:
            ids.pop()
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))
