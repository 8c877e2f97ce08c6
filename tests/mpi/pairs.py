"""A training engine and a rollout engine, each in its own layout, with a real refit between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.config.schema import OptimConfig
from hpcrl.engine.engine import TrainEngine
from hpcrl.engine.refit.planner import Resharding
from hpcrl.engine.refit.refit import Refit
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.engine import max_kv_bytes
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.protocol import Completion, Request, SamplingParams
from hpcrl.runtime import platform
from hpcrl.runtime.groups import GroupCache, make_groups
from hpcrl.runtime.layout import Layout
from tests.mpi.layouts import make_batch, part_of, policy_loss

if TYPE_CHECKING:
    from hpcrl.runtime.world import World


def training_engine(
    world: World,
    cache: GroupCache,
    shape: ModelShape,
    layout: Layout,
    *,
    dtype: torch.dtype = torch.float32,
    lr: float = 1e-2,
    exact: bool = False,
    gradient_accumulation_fusion: bool | None = None,
) -> TrainEngine | None:
    """None on ranks outside `layout`."""
    groups = make_groups({"actor": layout}, world.rank, cache)
    optim = OptimConfig(lr=lr)
    if "actor" not in groups:
        return None
    options = {"dtype": dtype, "exact": exact, "gradient_accumulation_fusion": gradient_accumulation_fusion}
    return TrainEngine(shape, groups["actor"], seed=3, optim=optim, total_steps=4, **options)


def train(actor: TrainEngine | None) -> None:
    """A real optimizer step: no weight stays what it was built with, and norms differ from 1."""
    if actor is not None:
        batch = part_of(make_batch(seed=actor.steps), actor.groups)
        metrics = actor.train(batch, loss=policy_loss, max_tokens=64, entropy=True)
        assert metrics["grad_norm"] > 0


class Pair:
    """`actor` and `engine` are None where this rank has no part in them."""

    def __init__(
        self,
        world: World,
        cache: GroupCache,
        shape: ModelShape,
        actor: TrainEngine | None,
        training: Layout,
        rollout: Layout,
        *,
        dtype: torch.dtype = torch.float32,
        exact: bool = False,
        share: bool = True,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 128,
        max_model_len: int = 32,
        kv_sequences: int | None = None,
    ) -> None:
        """`dtype` is the rollout's; `kv_sequences` of `max_model_len` tokens fit the KV cache (None: as many as run);
        `share`: engines on the same ranks share the weights that are laid out alike."""
        self.world, self.actor, self.rollout = world, actor, rollout
        groups = make_groups({"rollout": rollout}, world.rank, cache).get("rollout")
        self.engine = groups and NativeEngine(
            shape,
            groups.tp if rollout.tp > 1 else None,
            groups.coord.tp,
            rollout.tp,
            dtype,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            kv_cache_bytes=kv_sequences
            and max_kv_bytes(shape, rollout.tp, dtype.itemsize, kv_sequences, max_model_len),
            exact=exact,
            device=platform.device(),
        )
        for weight in self.engine.weights().values() if self.engine else ():
            weight.fill_(torch.nan)  # the refit must write every element
        self._refit = Refit(Resharding(shape, training, rollout, dtype.itemsize), world.comm, world.rank, dtype)
        if share and training.ranks == rollout.ranks and actor is not None and self.engine is not None:
            self._refit.share(actor.named_shards(), self.engine.weights(), self.engine.adopt)

    def refit(self) -> None:
        source = self.actor.named_shards() if self.actor else {}
        if self.engine is None:
            self._refit.run(source, {})
        else:
            with self.engine.updating_weights():
                self._refit.run(source, self.engine.weights())

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> DataProto:
        """Requests dealt out to the replicas; the same batch of prompts and responses on every rank."""
        replicas = self.rollout.dp
        mine = self.rollout.coord(self.world.rank).dp if self.engine else 0
        done = self.engine.generate(requests[mine::replicas], sampling, seed=1, step=4) if self.engine else []
        drawn = self.world.all_gather_object(done)
        completions: list[Completion] = [
            drawn[self.rollout.rank_of(dp=number % replicas)][number // replicas] for number in range(len(requests))
        ]
        rows = [[*request.prompt_ids, *one.token_ids] for request, one in zip(requests, completions, strict=True)]
        log_probs = [one.log_probs for one in completions]
        return DataProto(
            {
                "input_ids": Ragged.from_rows(rows, np.int32),
                "rollout_log_probs": Ragged.from_rows(log_probs),
                "response_mask": Ragged.from_rows([np.ones_like(of_row) for of_row in log_probs]),
            }
        )

    def with_old_log_probs(self, batch: DataProto, sampling: SamplingParams, max_tokens: int) -> DataProto | None:
        """This replica's part of `batch` with the training engine's column; None but on its last stage."""
        if self.actor is None:
            return None
        mine = part_of(batch, self.actor.groups)
        found = self.actor.log_probs(mine, max_tokens=max_tokens, temperature=sampling.temperature)
        if not found:
            return None
        mine.tokens["old_log_probs"] = found["log_probs"]
        return mine

    def close(self) -> None:
        self._refit.close()
