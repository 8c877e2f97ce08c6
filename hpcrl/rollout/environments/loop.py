"""Multi-turn generation: the model calls tools or talks with a simulated user, and continues in the same response."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrl.algorithms.metrics import Metric, Sum
from hpcrl.data.chat import messages_of
from hpcrl.data.media import MediaReader
from hpcrl.data.prompts import prompt_ids
from hpcrl.rollout.environments.conversation import Conversation
from hpcrl.rollout.environments.environment import Schema
from hpcrl.rollout.environments.environment_responder import ENVIRONMENT_COUNTS, EnvironmentResponder, environment_pool
from hpcrl.rollout.environments.tool_responder import TOOL_COUNTS, ToolResponder
from hpcrl.rollout.environments.tool_worker import AgentSource
from hpcrl.rollout.environments.tools import PARSERS, tool_schemas
from hpcrl.rollout.environments.turn_handler import Responder, Tally, TurnHandler, TurnResult
from hpcrl.rollout.environments.turn_template import Message, TurnTemplate
from hpcrl.rollout.protocol import Completion, Request, RolloutEngine, SamplingParams, ToolPicture, Trajectory
from hpcrl.runtime.exits import InputError
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
    if there is no result yet. `comm` is None if the replica has one rank. `encode` is collective over the replica.
    starts: conversations whose first turn has the prompt of its request are in the engine already; else all of them
    wait for their prompts.
    """

    conversations: Sequence[Conversation]
    starts: bool
    handler: TurnHandler | None
    comm: MPI.Intracomm | None
    on_finished: Callable[[int, Trajectory], None] | None
    on_step: Callable[[], None] | None
    encode: Encode | None = None
    trajectories: dict[int, Trajectory] = field(default_factory=dict, init=False)
    waited: float = field(default=0.0, init=False)  # seconds in which the engine had no work

    def __post_init__(self) -> None:
        numbers = list(range(len(self.conversations)))
        self._conversation_of = numbers if self.starts else []  # by index of the engine's request
        self._num_waiting = 0 if self.starts else len(numbers)

    def turn_ended(self, index: int, done: Completion) -> None:
        """The engine's `on_finished`."""
        number = self._conversation_of[index]
        conversation = self.conversations[number]
        conversation.add_turn(done)
        self._num_waiting += 1
        if self.handler is not None:
            self.handler.add_turn(number)

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
        pictures = () if result.answer is None else result.answer.pictures
        request = result.next_request(conversation, [next(features) for _ in pictures])
        if request is not None:
            self._conversation_of.append(number)
            return [request]
        self.trajectories[number] = done = result.trajectory(conversation)
        if self.on_finished is not None:
            self.on_finished(number, done)
        return []

    def _next_results(self, idle: bool) -> list[TurnResult]:
        """Return the leader's results, on every rank. If the engine is idle, waits for the first one."""
        results: list[TurnResult] = []
        if self.handler is not None:
            results = self.handler.poll()
            if idle and not results:
                began = time.perf_counter()
                results = self._wait_for_results(self.handler)
                self.waited += time.perf_counter() - began
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
    the tools or the environments.

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
        max_open: int = 256,
    ) -> None:
        """Load the user's tools or environments. Raises InputError if the user's files are unusable.

        Args:
            log_path: file for the tools' output; None drops it.
            images: for a vision-language model.
            max_open: environments that are open at the same time.
        """
        self._cfg = cfg
        self._data = data
        self._tokenizer = tokenizer
        self._comm = comm if comm is not None and comm.size > 1 else None
        self._pool: ProcessPool | None = None
        self._warned: Counter[str] = Counter()
        if self._comm is not None and self._comm.rank > 0:
            return
        # The file may register a parser.
        self._schemas = None if cfg.function_tool_path is None else tool_schemas(cfg.function_tool_path)
        self._parser = PARSERS.get(cfg.format)
        self._keys = itertools.count()
        self._max_open = cfg.environment.max_open or max_open
        if cfg.has_environment:
            if images is not None:
                raise InputError(
                    "rollout.multi_turn.environment.path: environments have no pictures, and the model is a "
                    "vision-language model; use tools (rollout.multi_turn.function_tool_path)"
                )
            self._template = TurnTemplate(tokenizer, data)
            # Of two generations at once: a validation runs while a stream's conversations wait.
            self._pool = environment_pool(cfg.environment, 2 * self._max_open, log_path)
            return
        if images is not None and cfg.template_history:
            raise InputError(
                "rollout.multi_turn.template_history=true does not go with a vision-language model; leave it out"
            )
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
        conversations, metrics = [Conversation(request) for request in requests], dict[str, Metric]()
        handler = self.handler(sampling, seed)
        if handler is not None:
            for number, conversation in enumerate(conversations):
                handler.open(number, conversation, {} if records is None else records[number])
        starts = not self.makes_prompts
        source = TurnSource(conversations, starts, handler, self._comm, on_finished, on_step, encode)
        first = requests if starts else []
        try:
            engine.generate(
                first, sampling, seed=seed, step=step, source=source, on_finished=source.turn_ended, on_step=on_step
            )
        finally:
            if handler is not None:
                handler.responder.end()
        if handler is not None:
            waited = {} if starts else {"perf/environment_wait_s": Sum(source.waited)}
            metrics = handler.responder.metrics() | waited
        return [source.trajectories[number] for number in range(len(requests))], metrics

    @property
    def makes_prompts(self) -> bool:
        """Whether conversations wait for a prompt before their first turn."""
        return self._cfg.has_environment

    def handler(self, sampling: SamplingParams, seed: int) -> TurnHandler | None:
        """What answers the model's turns, on the leader; None on other ranks."""
        if self._pool is None:
            return None
        text_of = partial(self._text, eos_token_ids=sampling.eos_token_ids)
        made = self._template, text_of, sampling.max_new_tokens, self._prompt_of
        return TurnHandler(self._cfg, self._responder(self._pool, seed), *made)

    def close(self) -> None:
        """End the tool processes. May be called twice."""
        if self._pool is not None:
            self._pool.close()

    def _responder(self, pool: ProcessPool, seed: int) -> Responder:
        """What answers the model in one generation."""
        if not self.makes_prompts:
            tally = Tally("tools", TOOL_COUNTS, self._warned)
            return ToolResponder(self._cfg, pool, self._parser, tally, self._schemas)
        prompt_of = partial(self._prompt_of, limit=self._data.max_prompt_length)
        fixed = pool, self._keys, self._max_open, self._parser, prompt_of, seed
        return EnvironmentResponder(self._cfg, *fixed, Tally("env", ENVIRONMENT_COUNTS, self._warned))

    def _prompt_of(
        self,
        prompt: str | list[Any] | None,
        messages: Sequence[Message],
        tools: Sequence[Schema] | None,
        limit: int | None = None,
    ) -> np.ndarray:
        """The tokens of a row's prompt, which is None in a new conversation, with further messages and with tools; of
        any number without a limit."""
        prepared = self._template.prepared(messages)
        tools = None if tools is None else self._template.cleaned(list(tools))
        if prompt is None:
            prompt = [] if self._data.chat_template or self._tokenizer.chat_template else ""
        if isinstance(prompt, str):
            before, after = (f"{prompt}\n", "") if prompt else ("", "\n")
            prompt = before + self._template.clean("\n".join(message["content"] for message in prepared)) + after
        else:
            prompt = [*(messages_of(prompt) or ()), *prepared]
        return prompt_ids(self._tokenizer, self._data, prompt, tools, limit)

    def _text(self, turn: np.ndarray, eos_token_ids: tuple[int, ...]) -> str:
        """Decode a turn without its end-of-sequence token; other special tokens stay visible."""
        ids = turn.tolist()
        if ids and ids[-1] in eos_token_ids:
            ids.pop()
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))
