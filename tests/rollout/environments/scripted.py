"""An engine whose model says what a test has written down, one token a step, as continuous batching would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcrl.rollout.protocol import Completion, Request, RequestSource, SamplingParams


@dataclass(eq=False)
class Running:
    index: int
    request: Request
    to_draw: np.ndarray
    drawn: int = 0


@dataclass
class ScriptedEngine:
    """`says(request)`: the next turn's tokens. `drawn`: every completion, by the index of its request."""

    says: Callable[[Request], np.ndarray]
    seed: int = 0
    requests: list[Request] = field(default_factory=list)
    drawn: list[Completion] = field(default_factory=list)

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        *,
        seed: int,
        step: int,
        source: RequestSource | None = None,
        on_finished: Callable[[int, Completion], None] | None = None,
        on_step: Callable[[], None] | None = None,
        should_abort: Any = None,
    ) -> list[Completion]:
        assert source is not None and on_finished is not None
        running = self._begin(requests)
        completions: dict[int, Completion] = {}
        more: Sequence[Request] | None = ()
        while running or more is not None:
            if more is not None:
                more = source.take(not running)
                running += self._begin(more or ())
            for one in list(running):
                one.drawn += 1
                stops = one.drawn == len(one.to_draw)
                if not stops and one.drawn < sampling.max_new_tokens - len(one.request.prefix_ids):
                    continue
                running.remove(one)
                ids = one.to_draw[: one.drawn]
                log_probs = -np.random.default_rng([self.seed, one.index]).random(len(ids), np.float32) - 0.01
                ends = stops and ids[-1] in sampling.eos_token_ids
                completions[one.index] = Completion(ids, log_probs, "stop" if ends else "length")
                on_finished(one.index, completions[one.index])
            if on_step is not None:
                on_step()
        self.drawn = [completions[index] for index in range(len(self.requests))]
        return self.drawn

    def _begin(self, requests: Sequence[Request]) -> list[Running]:
        found = []
        for request in requests:
            found.append(Running(len(self.requests), request, self.says(request)))
            self.requests.append(request)
        return found
