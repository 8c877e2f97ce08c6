"""One sample on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcrl.rollout.protocol import Request
from hpcrl.rollout.sampling import request_key


@dataclass(frozen=True, eq=False)
class Sequence:
    """`index` is its place among the requests, `prompt_ids` int64 (n,), `key` its Philox key (2,) uint32."""

    index: int
    prompt_ids: np.ndarray
    key: np.ndarray
    sample_index: int
    max_new_tokens: int

    @classmethod
    def from_request(cls, index: int, request: Request, seed: int, max_new_tokens: int) -> Sequence:
        prompt_ids = np.asarray(request.prompt_ids, dtype=np.int64)
        return cls(index, prompt_ids, request_key(seed, request.uid), request.sample_index, max_new_tokens)

    @property
    def prompt_length(self) -> int:
        return len(self.prompt_ids)
