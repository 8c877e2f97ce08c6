"""One call of `generate` over a replica: its first rank talks to the engine, and all ranks hear the same.

The engine batches by itself; what is here decides what is in flight, tells the ranks, and ends what is to be aborted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from hpcrl.rollout.protocol import Completion, Request, RequestSource, SamplingParams
from hpcrl.rollout.tensorrt_llm.conversion import Output, completion, input_ids, nothing_drawn
from hpcrl.rollout.tensorrt_llm.sampling import new_tokens, sampling_arguments

T = TypeVar("T")

ROUND_SECONDS = 0.02  # between two rounds of news in which nothing ended
CANCEL_SECONDS = 60.0  # then a cancelled request that never answers is taken for one that had not started


class Server(Protocol):
    """The engine as its replica's first rank sees it; a handle is whatever it gives for a request."""

    def submit(self, token_ids: list[int], arguments: dict[str, Any]) -> Any: ...

    def poll(self, handle: Any) -> Output | None:
        """The output once it is whole; never waits."""
        ...

    def cancel(self, handle: Any) -> None: ...


class Generation:
    """`server` is None on all ranks but the first; `share` gives every rank what the first one passes.

    No more than `max_in_flight` requests are with the engine: one that it queues without starting it does not answer
    when it is cancelled.
    """

    def __init__(
        self,
        server: Server | None,
        share: Callable[[Any], Any],
        sampling: SamplingParams,
        *,
        seed: int,
        step: int,
        max_in_flight: int,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self._server = server
        self._share = share
        self._sampling = sampling
        self._seed, self._step = seed, step
        self._max_in_flight = max_in_flight
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._requests: list[Request] = []
        self._inputs: list[list[int]] = []
        self._waiting: deque[int] = deque()
        self._in_flight: dict[int, Any] = {}  # on the first rank alone
        self._completions: dict[int, Completion] = {}

    def run(
        self,
        requests: Sequence[Request],
        *,
        source: RequestSource | None = None,
        on_finished: Callable[[int, Completion], None] | None = None,
        on_step: Callable[[], None] | None = None,
        should_abort: Callable[[], bool] | None = None,
    ) -> list[Completion]:
        """See RolloutEngine.generate. Collective over the replica."""
        self._add(requests)
        while True:
            if should_abort is not None and should_abort():
                self._abort(on_finished)
                break
            if source is not None:
                more = source.take(self._num_open == 0)
                if more is None:
                    source = None
                else:
                    self._add(more)
            if self._num_open == 0:
                if source is None:
                    break
                continue
            self._store(self._share(self._advance()), on_finished)
            if on_step is not None:
                on_step()
        return [self._completions[index] for index in range(len(self._requests))]

    @property
    def _num_open(self) -> int:
        return len(self._requests) - len(self._completions)

    def _add(self, requests: Sequence[Request]) -> None:
        """Every rank checks alike, before anything of them is under way."""
        for request in requests:
            ids = input_ids(request, self._vocab_size)
            limit = new_tokens(request, self._sampling)
            if limit < 1:
                raise ValueError(f"prompt {request.uid} may draw {limit} tokens; expected 1 or more")
            if len(ids) + limit > self._max_model_len:
                raise ValueError(
                    f"prompt {request.uid} has {len(ids)} tokens and may draw {limit}, together more than "
                    f"max_model_len={self._max_model_len}; shorten one of them"
                )
            self._waiting.append(len(self._requests))
            self._requests.append(request)
            self._inputs.append(ids)

    def _advance(self) -> list[tuple[int, Completion]]:
        """On the first rank: submit what fits, and what has ended within a round."""
        if self._server is None:
            return []
        while self._waiting and len(self._in_flight) < self._max_in_flight:
            index = self._waiting.popleft()
            request = self._requests[index]
            arguments = sampling_arguments(request, self._sampling, seed=self._seed, step=self._step)
            self._in_flight[index] = self._server.submit(self._inputs[index], arguments)
        return self._wait(ROUND_SECONDS)

    def _wait(self, seconds: float) -> list[tuple[int, Completion]]:
        """Those that have ended; asks again until one has, or so many seconds have passed."""
        assert self._server is not None
        give_up = time.monotonic() + seconds
        while True:
            ended = []
            for index, handle in list(self._in_flight.items()):
                output = self._server.poll(handle)
                if output is not None:
                    del self._in_flight[index]
                    ended.append((index, completion(output, self._requests[index].uid)))
            if ended or not self._in_flight or time.monotonic() >= give_up:
                return ended
            time.sleep(1e-3)

    def _store(
        self, ended: list[tuple[int, Completion]], on_finished: Callable[[int, Completion], None] | None
    ) -> None:
        for index, done in ended:
            self._completions[index] = done
            if on_finished is not None and done.finish_reason != "abort":
                on_finished(index, done)

    def _abort(self, on_finished: Callable[[int, Completion], None] | None) -> None:
        """End all that is open; what ended by itself in the meantime keeps its reason, and is told."""
        ended: list[tuple[int, Completion]] = []
        if self._server is not None:
            for handle in self._in_flight.values():
                self._server.cancel(handle)
            give_up = time.monotonic() + CANCEL_SECONDS
            while self._in_flight and time.monotonic() < give_up:
                ended += self._wait(ROUND_SECONDS)
        self._store(self._share(ended), on_finished)
        for index in range(len(self._requests)):
            self._completions.setdefault(index, nothing_drawn())
