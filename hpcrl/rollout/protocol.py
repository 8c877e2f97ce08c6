"""What a generation engine takes and gives, whichever engine it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Request:
    """One sample to draw: `uid` names the prompt, `sample_index` tells its samples apart."""

    prompt_ids: list[int] | np.ndarray
    uid: str
    sample_index: int = 0


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. Temperature 0 is greedy; top_k = -1 and top_p = 1 keep every token."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    ignore_eos: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}; it must be 1 or more")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}; it must be 0 (greedy) or more")
        if self.top_k == 0 or self.top_k < -1:
            raise ValueError(f"top_k={self.top_k}; use -1 for all tokens, or 1 and more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}; it must lie in (0, 1]")


@dataclass(frozen=True, eq=False)
class Completion:
    """A response: `token_ids` int32 (n,) with the end-of-sequence token when there is one; `log_probs` fp32 (n,).

    The log-prob of a token is after temperature and before top-k and top-p (greedy: under temperature 1).
    """

    token_ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: Literal["stop", "length"]


class RolloutEngine(Protocol):
    """One replica. Its tensor-parallel ranks make the same calls with the same arguments and get the same results."""

    def weights(self) -> dict[str, Tensor]:
        """This rank's shards by global parameter name, buffers that live as long as the engine: refit writes there."""
        ...

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        *,
        seed: int,
        step: int,
        on_finished: Callable[[int, Completion], None] | None = None,
        on_step: Callable[[], None] | None = None,
    ) -> list[Completion]:
        """One completion per request, in their order, whatever the engine's batching.

        `on_finished(index of the request, completion)` is called as soon as a response is complete, `on_step()` about
        once a token, so that scoring goes on meanwhile. Neither may wait: the other ranks of the replica would, too.
        """
        ...

    def sleep(self) -> None:
        """Gives back the memory that only generation needs; weights stay."""
        ...

    def wake(self) -> None:
        """Takes it again."""
        ...
