"""Interface of generation engines: requests, completions, trajectories, and the `RolloutEngine` protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

from hpcrl.batch.data_proto import NOT_RECORDED

if TYPE_CHECKING:
    from torch import Tensor

    from hpcrl.batch.pictures import Picture

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, eq=False)
class PromptPicture:
    """A picture of a request. key: hash of its content. features: fp32 (tokens, width), what the vision tower made of
    it (see `hpcrl.model.tower`)."""

    key: int
    place: Picture
    features: Tensor


@dataclass(frozen=True)
class ToolPicture:
    """A picture that a tool returned. key: as in `PromptPicture`. place: in the sequence. png: its content."""

    key: int
    place: Picture
    png: bytes


@dataclass(frozen=True, eq=False)
class Request:
    """One sample to draw: `uid` names the prompt, `sample_index` the sample.

    `prefix_ids` int32 (n,) are the tokens so far: an aborted part, or earlier turns with tool tokens. `num_before` are
    tokens of the response before them, if it has several sequences: those of earlier ones, and of this one's prompt.
    `max_new_tokens` bounds the tokens still to draw; None: that of the sampling parameters less `position`. `pictures`
    are those of prompt and prefix, in order.
    """

    prompt_ids: list[int] | np.ndarray
    uid: str
    sample_index: int = 0
    prefix_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    max_new_tokens: int | None = None
    pictures: tuple[PromptPicture, ...] = ()
    num_before: int = 0

    @property
    def position(self) -> int:
        """Place in the response of the first token to draw, for the random numbers too."""
        return self.num_before + len(self.prefix_ids)

    def num_to_draw(self, sampling: SamplingParams) -> int:
        """Return the largest number of tokens to draw."""
        return sampling.max_new_tokens - self.position if self.max_new_tokens is None else self.max_new_tokens

    def context_ids(self, sampling: SamplingParams, max_model_len: int, vocab_size: int) -> np.ndarray:
        """Return prompt and prefix, int32 (n,). Raises ValueError for a request that the engine cannot serve."""
        what, limit = f"prompt {self.uid}", self.num_to_draw(sampling)
        context = np.concatenate([self.prompt_ids, self.prefix_ids])
        if not len(self.prompt_ids):
            raise ValueError(f"{what} has no tokens; at least one is needed, such as a beginning-of-sequence token")
        if limit < 1:
            raise ValueError(
                f"{what} may draw {limit} more tokens after {self.position}; it must be 1 or more: drop such requests"
            )
        if len(context) + limit > max_model_len:
            raise ValueError(
                f"{what} has {len(context)} tokens; with max_new_tokens={limit} that is more than "
                f"max_model_len={max_model_len}; shorten one of them or raise the engine's limit"
            )
        # Under tensor parallelism an id outside the embedding would read as zeros without an error.
        if context.min() < 0 or context.max() >= vocab_size:
            raise ValueError(f"{what} has token ids {context.min()} to {context.max()}; expected 0 to {vocab_size - 1}")
        return context.astype(np.int32)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. Temperature 0 is greedy; top_k = -1 and top_p = 1 keep every token.

    `routed_experts`: completions contain the experts of each token.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    ignore_eos: bool = False
    eos_token_ids: tuple[int, ...] = ()
    routed_experts: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}; it must be 1 or more")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}; it must be 0 (greedy) or more")
        if self.top_k == 0 or self.top_k < -1:
            raise ValueError(f"top_k={self.top_k}; use -1 for all tokens, or 1 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}; it must lie in (0, 1]")


class Prefill(NamedTuple):
    """Tokens that were in the cache before a sequence decoded, each time that it started: `computed` by the model, and
    `reused`, which were cached already."""

    computed: int = 0
    reused: int = 0

    def plus(self, other: Prefill) -> Prefill:
        return Prefill(self.computed + other.computed, self.reused + other.reused)


@dataclass(frozen=True, eq=False)
class Completion:
    """The result of a request: `token_ids` int32 (n,) with the end-of-sequence token if there is one; `log_probs` fp32
    (n,). Tokens of the request's prefix are not repeated.

    The log-prob of a token is after temperature and before top-k and top-p (greedy: under temperature 1). To continue
    an aborted sequence, make a new request with these tokens appended to its prefix. `routed_experts` int16 (m, layers
    x topk), if requested, are the experts of each token in each MoE layer, from the prompt's first token to the last
    one that the model has run: all but the last drawn. `prefill` is 0 of engines that do not count it.
    """

    token_ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: FinishReason
    routed_experts: np.ndarray | None = None
    prefill: Prefill = Prefill()


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A whole response, of one turn or of several: all arrays (n,).

    `mask` int32 is 1 on tokens that the model wrote and 0 on those of tools and users, whose `log_probs` are 0.
    `routed_experts` as in a completion. `pictures` are those that tools returned. prompt_ids int32: if they are not
    those of the request. rewards fp32 and states int32: of turns, and of the environment before them, on their last
    tokens. info: the last of the environment. sequence_starts int32 (k,): places in prompt and response of
    the first tokens of further sequences, each with a prompt of its own. With the finish reason "error" it failed, and
    `mask` is 0.
    """

    token_ids: np.ndarray
    log_probs: np.ndarray
    mask: np.ndarray
    finish_reason: FinishReason
    num_turns: int = 1  # of the model
    num_tool_calls: int = 0
    turn_scores: tuple[float, ...] = ()  # by a simulated user, of the turns that it scored
    routed_experts: np.ndarray | None = None
    pictures: tuple[ToolPicture, ...] = ()
    prompt_ids: np.ndarray | list[int] | None = None
    rewards: np.ndarray | None = None
    states: np.ndarray | None = None
    info: Mapping[str, float | str] | None = None
    prefill: Prefill = Prefill()  # of all turns
    sequence_starts: np.ndarray | None = None

    @property
    def num_sequences(self) -> int:
        return 1 + (0 if self.sequence_starts is None else len(self.sequence_starts))

    @classmethod
    def from_completion(cls, done: Completion) -> Trajectory:
        mask = np.ones(len(done.token_ids), np.int32)
        return cls(
            done.token_ids,
            done.log_probs,
            mask,
            done.finish_reason,
            routed_experts=done.routed_experts,
            prefill=done.prefill,
        )


def merge_routed_experts(first: np.ndarray | None, second: np.ndarray | None, before: int = 0) -> np.ndarray | None:
    """Join the `routed_experts` of a continued response. A token keeps the record of its first run, which the log-prob
    of the next token depends on, although the engine ran it again.

    Args:
        before: number of tokens of earlier sequences, which `second` does not have.
    """
    if second is None:
        return first
    first = second[:0] if first is None else first
    not_run = np.full((max(0, before - len(first)), second.shape[1]), NOT_RECORDED, second.dtype)
    return np.concatenate([first, not_run, second[max(0, len(first) - before) :]])


OnFinished = Callable[[int, Completion], None] | None  # (index of the request, completion)


class RequestSource(Protocol):
    """Requests that arrive while others are being answered, such as the next turn of a conversation, which has the
    `uid` and `sample_index` of the turn before."""

    def take(self, idle: bool) -> Sequence[Request] | None:
        """Return the requests to add now, possibly none; None: no more will come.

        Called about once a token. Every rank of the replica gets the same result of the same call.

        Args:
            idle: whether the engine has no other work, so that the call may wait.
        """


class RolloutEngine(Protocol):
    """One replica. Its tensor-parallel ranks make the same calls with the same arguments and get the same results."""

    def weights(self) -> dict[str, Tensor]:
        """Return this rank's shards by name, in buffers that live as long as the engine. Refit writes to them. With
        `rollout.quantization` some are `hpcrl.kernels.fp8_matrix.Fp8Matrix`."""

    def adopt(self, name: str, tensor: Tensor) -> None:
        """Replace weight `name` by `tensor`, of the same shape, dtype and device; the engine's own buffer is freed.

        The owner of `tensor` may change it between generations.
        """

    def updating_weights(self) -> AbstractContextManager[None]:
        """Context in which `weights()` may be written. No generation may be in progress, and nothing cached outlives
        it."""

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        *,
        seed: int,
        step: int,
        source: RequestSource | None = None,
        on_finished: OnFinished = None,
        on_step: Callable[[], None] | None = None,
        should_abort: Callable[[], bool] | None = None,
    ) -> list[Completion]:
        """Return one completion per request, in their order, followed by those from `source`.

        `on_finished(index of the request, completion)` is called when a completion is done, `on_step()` about once a
        token, to advance scoring. Neither may wait, because the other ranks of the replica would wait too.
        `should_abort()` is called about once a token and returns the same on every rank of the replica; if it is true,
        running and waiting sequences end at once with finish_reason "abort" (without a call of `on_finished`).
        """

    def sleep(self) -> None:
        """Free the memory that only generation needs; weights stay."""

    def wake(self) -> None:
        """Allocate that memory again."""


class PictureEncoder(Protocol):
    """An engine that supports pictures."""

    def share(self, grids: np.ndarray) -> list[int]:
        """Return the numbers of the pictures that this rank encodes of those with these `grids`, int (n, 3)."""

    def encode(
        self, grids: np.ndarray, patches: Callable[[list[int]], list[np.ndarray]], *, divided: bool = True
    ) -> list[Tensor]:
        """Return the vision tower's features of each picture, fp32 (tokens, width) on the CPU. Collective over the
        tensor-parallel ranks, which divide the pictures, if `divided`.

        Args:
            grids: int (n, 3), patches in time, height and width.
            patches: from the numbers of this rank's pictures to fp32 (patches, patch width) each.
        """


class Call(Protocol):
    """One call of `generate`, with the same requests on every rank of the replica."""

    completions: dict[int, Completion]  # by the index of the request

    @property
    def has_work(self) -> bool:
        """Whether a request is open."""

    def add(self, requests: Sequence[Request]) -> None:
        """Open requests, numbered in their order."""

    def step(self) -> None:
        """Advance the open requests by about a token."""

    def abort(self) -> None:
        """End all open requests."""


def completed(
    call: Call,
    requests: Sequence[Request],
    source: RequestSource | None = None,
    on_step: Callable[[], None] | None = None,
    should_abort: Callable[[], bool] | None = None,
) -> list[Completion]:
    """Return the completions of a call; the arguments are those of `RolloutEngine.generate`."""
    call.add(requests)
    while should_abort is None or not should_abort():
        if source is not None:
            more = source.take(idle=not call.has_work)
            source = None if more is None else source
            call.add(more or ())
        if call.has_work:
            call.step()
            if on_step is not None:
                on_step()
        elif source is None:
            break
    if call.has_work:
        call.abort()
    return [call.completions[index] for index in range(len(call.completions))]


class EngineOfCalls:
    """What engines share whose `generate` is a `Call`: there is none while the engine sleeps, and no refit during one.

    _begin: makes a call from the sampling parameters, the seed, the step, `on_finished`, and whether there is a source.
    """

    _begin: Callable[..., Call]
    _generating = False

    @property
    def is_asleep(self) -> bool:
        raise NotImplementedError

    @contextmanager
    def updating_weights(self) -> Iterator[None]:
        if self._generating:
            raise RuntimeError("weights cannot be updated while a generation is in progress; abort it first")
        yield

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        *,
        seed: int,
        step: int,
        source: RequestSource | None = None,
        on_finished: OnFinished = None,
        on_step: Callable[[], None] | None = None,
        should_abort: Callable[[], bool] | None = None,
    ) -> list[Completion]:
        import torch

        if self.is_asleep:
            raise RuntimeError("the engine is asleep; call wake() before generate()")
        with torch.no_grad():
            call = self._begin(sampling, seed, step, on_finished, source is not None)
            self._generating = True
            try:
                return completed(call, requests, source, on_step, should_abort)
            finally:
                self._generating = False
