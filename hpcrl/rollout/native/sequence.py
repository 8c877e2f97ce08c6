"""One sample on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hpcrl.rollout.protocol import Completion, FinishReason, Request, SamplingParams
from hpcrl.rollout.sampling import request_key


@dataclass(eq=False)
class Sequence:
    """`index` is its place among the requests; `context_ids` int32 (n,) are prompt and prefix.

    `key` is its Philox key (2,) uint32, `first_position` the place in the response of the first token to draw. `group`
    is the index of the first sequence of equal context that is known. `drawn` are its tokens up to when it last left
    the running batch, or a little earlier, in parts: ids int32 (n,) and log-probs fp32 (n,). `routed` are the experts
    of the tokens run by then, int16 (n, layers x topk), also in parts; the first is of the context but its last token.
    """

    index: int
    context_ids: np.ndarray
    key: np.ndarray
    sample_index: int
    first_position: int
    max_new_tokens: int
    group: int
    drawn: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    routed: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def from_request(cls, index: int, request: Request, sampling: SamplingParams, seed: int) -> Sequence:
        context_ids = np.concatenate([request.prompt_ids, request.prefix_ids]).astype(np.int32)
        first = len(request.prefix_ids)
        limit = sampling.max_new_tokens - first if request.max_new_tokens is None else request.max_new_tokens
        return cls(index, context_ids, request_key(seed, request.uid), request.sample_index, first, limit, index)

    @property
    def num_drawn(self) -> int:
        return sum(len(ids) for ids, _ in self.drawn)

    @property
    def num_to_cache(self) -> int:
        """Tokens that must be in the KV cache before it decodes: all but the last, which decoding starts from."""
        return len(self.context_ids) + self.num_drawn - 1

    def token_ids(self) -> np.ndarray:
        """Context and what was drawn, int32 (n,)."""
        return np.concatenate([self.context_ids, *(ids for ids, _ in self.drawn)])

    def completion(self, reason: FinishReason) -> Completion:
        """What was drawn, which leaves the sequence: it would be held twice."""
        ids, log_probs = [np.zeros(0, np.int32)], [np.zeros(0, np.float32)]
        for part in self.drawn:
            ids.append(part[0])
            log_probs.append(part[1])
        routed = np.concatenate(self.routed) if self.routed else None
        self.drawn, self.routed = [], []
        return Completion(np.concatenate(ids), np.concatenate(log_probs), reason, routed)
