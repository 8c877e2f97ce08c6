"""Multi-turn generation: the model calls tools or talks with a simulated user, and goes on in the same response."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrl.algorithms.metrics import Metric
from hpcrl.rollout.agent.moderator import Moderator
from hpcrl.rollout.agent.parsers import tool_parser
from hpcrl.rollout.agent.statistics import tool_metrics
from hpcrl.rollout.agent.tool_worker import AgentSource
from hpcrl.rollout.agent.tools import tool_schemas
from hpcrl.rollout.agent.turn_source import TurnSource
from hpcrl.rollout.agent.turn_template import TurnTemplate
from hpcrl.rollout.protocol import Request, RolloutEngine, SamplingParams, Trajectory
from hpcrl.sandbox.process_pool import ProcessPool

if TYPE_CHECKING:
    from mpi4py import MPI
    from transformers import PreTrainedTokenizerBase

    from hpcrl.config.schema import DataConfig, MultiTurnConfig


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
