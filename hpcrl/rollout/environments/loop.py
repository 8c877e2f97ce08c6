"""Multi-turn generation: the model calls tools or talks with a simulated user, and continues in the same response."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrl.algorithms.metrics import Metric
from hpcrl.data.media import MediaReader
from hpcrl.rollout.environments.conversation import Conversation, TurnTemplate
from hpcrl.rollout.environments.tool_worker import AgentSource
from hpcrl.rollout.environments.tools import PARSERS, tool_schemas
from hpcrl.rollout.environments.turn_handler import TurnHandler, TurnResult, tool_metrics
from hpcrl.rollout.protocol import Completion, Request, RolloutEngine, SamplingParams, ToolPicture, Trajectory
from hpcrl.runtime.mpi import broadcast_object, wait_until
from hpcrl.sandbox.process_pool import ProcessPool

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from hpcrl.config.schema import DataConfig, MultiTurnConfig
    from hpcrl.data.images import ImageProcessor

Encode = Callable[[Sequence[ToolPicture]], Sequence["Tensor"]]  # pictures -> features, fp32 (tokens, width) each


@dataclass(eq=False)
class TurnSource:
    """Next turns of conversations, on one rank; a `RequestSource`. The leader, rank 0 of `comm`, has the turn handler
    and broadcasts its results.

    All ranks count the turns that wait for a result: while there are some, each call broadcasts one message, of 8 bytes
    if there is no result yet. `comm` is None if the replica has one rank. `records` are needed on the leader only.
    `encode` is collective over the replica.
    """

    conversations: Sequence[Conversation]
    records: Sequence[dict[str, Any]] | None
    handler: TurnHandler | None
    comm: MPI.Intracomm | None
    on_finished: Callable[[int, Trajectory], None] | None
    on_step: Callable[[], None] | None
    encode: Encode | None = None
    trajectories: dict[int, Trajectory] = field(default_factory=dict, init=False)
    _num_waiting: int = 0

    def __post_init__(self) -> None:
        self._conversation_of = list(range(len(self.conversations)))  # by index of the engine's request

    def turn_ended(self, index: int, done: Completion) -> None:
        """The engine's `on_finished`."""
        number = self._conversation_of[index]
        conversation = self.conversations[number]
        conversation.add_turn(done)
        self._num_waiting += 1
        if self.handler is not None:
            record = self.records[number] if self.records is not None else {}
            self.handler.add_turn(number, conversation, done.token_ids, record)

    def take(self, idle: bool) -> Sequence[Request] | None:
        requests: list[Request] = []
        while self._num_waiting and not requests:
            results = self._next_results(idle)
            pictures = [picture for result in results if result.answer for picture in result.answer.pictures]
            features = iter(self.encode(pictures) if pictures and self.encode is not None else ())
            for result in results:
                requests += self._apply(result, features)
            if not idle:
                break
        if len(self.trajectories) == len(self.conversations):
            return None
        return requests

    def _apply(self, result: TurnResult, features: Iterator[Tensor]) -> list[Request]:
        """Return the request for the conversation's next turn, if there is one. Takes the features of its pictures."""
        self._num_waiting -= 1
        number, conversation = result.conversation, self.conversations[result.conversation]
        if result.answer is not None:
            conversation.add_answer(result.answer, [next(features) for _ in result.answer.pictures])
            self._conversation_of.append(number)
            return [conversation.next_request()]
        done = conversation.trajectory(result.finish_reason, result.num_tool_calls, result.turn_scores)
        self.trajectories[number] = done
        if self.on_finished is not None:
            self.on_finished(number, done)
        return []

    def _next_results(self, idle: bool) -> list[TurnResult]:
        """Return the leader's results, on every rank. If the engine is idle, waits for the first one."""
        results: list[TurnResult] = []
        if self.handler is not None:
            results = self.handler.poll()
            if idle and not results:
                results = self._wait_for_results(self.handler)
        return results if self.comm is None else broadcast_object(self.comm, results or None) or []

    def _wait_for_results(self, handler: TurnHandler) -> list[TurnResult]:
        """Wait for results, and advance scoring meanwhile."""
        results: list[TurnResult] = []

        def has_results() -> bool:
            if self.on_step is not None:
                self.on_step()
            results.extend(handler.poll())
            return bool(results)

        wait_until(has_results)
        return results


class AgentLoop:
    """Multi-turn generation on one rank of a replica with ranks `comm` (None: one rank); rank 0 is the leader and has
    the tools.

    Turns end when the model writes its end-of-sequence token. Tokens depend on weights, random numbers and answers
    only. The arrival times of answers decide which sequences are computed together, so repeated runs agree up to
    rounding, and bitwise under rollout.exact.
    """

    def __init__(
        self,
        cfg: MultiTurnConfig,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        comm: MPI.Intracomm | None = None,
        log_path: str | None = None,
        images: ImageProcessor | None = None,
    ) -> None:
        """`log_path`: file for the tools' output; None drops it. images: of a vision-language model. Raises InputError
        if the user's files are unusable."""
        self._cfg = cfg
        self._tokenizer = tokenizer
        self._comm = comm if comm is not None and comm.size > 1 else None
        self._pool: ProcessPool | None = None
        self._warned: Counter[str] = Counter()
        if self._comm is not None and self._comm.rank > 0:
            return
        if cfg.function_tool_path is not None:
            tool_schemas(cfg.function_tool_path)  # the file may register a parser
        self._parser = PARSERS.get(cfg.format)
        reader = None if images is None else MediaReader(images, tokenizer, data)
        self._template = TurnTemplate(tokenizer, data, reader)
        limit = 0 if images is None else data.max_image_pixels
        source = AgentSource(cfg.function_tool_path, cfg.interaction_path, cfg.interaction_name, limit)
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
        encode: Encode | None = None,
    ) -> tuple[list[Trajectory], dict[str, Metric]]:
        """Return one trajectory per request, in their order, on every rank of the replica; on the leader also metrics
        of tools.

        `records`, on the leader, are the row data of each request for tools and users (`PromptDataset.record`). A
        trajectory has at most sampling.max_new_tokens, answers included, and ends with a token of the model.
        `on_finished(index of the request, trajectory)` and `on_step()` must not wait. `encode` is called with the
        pictures that tools return, by all ranks of the replica together.
        """
        handler = None
        if self._pool is not None:
            handler = TurnHandler(
                self._cfg,
                self._pool,
                self._parser,
                self._template,
                lambda turn: self._text(turn, sampling.eos_token_ids),
                sampling.max_new_tokens,
                self._warned,
            )
        source = TurnSource(
            [Conversation(request) for request in requests], records, handler, self._comm, on_finished, on_step, encode
        )
        engine.generate(
            requests, sampling, seed=seed, step=step, source=source, on_finished=source.turn_ended, on_step=on_step
        )
        trajectories = [source.trajectories[number] for number in range(len(requests))]
        return trajectories, tool_metrics(handler) if handler is not None else {}

    def close(self) -> None:
        """End the tool processes. May be called twice."""
        if self._pool is not None:
            self._pool.close()

    def _text(self, turn: np.ndarray, eos_token_ids: tuple[int, ...]) -> str:
        """Decode a turn without its end-of-sequence token; other special tokens stay visible."""
        ids = turn.tolist()
        if ids and ids[-1] in eos_token_ids:
            ids.pop()
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))
