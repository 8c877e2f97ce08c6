"""What roles with a megatron model have in common: building, loading and saving it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from hpcrl.algorithms.aggregation import LossNorm
from hpcrl.algorithms.metrics import Mean, Metric, to_floats
from hpcrl.batch.data_proto import DataProto, training_mask
from hpcrl.batch.packing import mini_batch_of
from hpcrl.config.roles import offloaded
from hpcrl.config.schema import Config, OptimConfig
from hpcrl.controller.register import Dispatch, Worker, register
from hpcrl.engine.checkpoint.manifest import SavedPart
from hpcrl.engine.checkpoint.store import is_hugging_face
from hpcrl.engine.engine import TrainEngine
from hpcrl.model.build import DTYPES
from hpcrl.model.hf_files import open_weights
from hpcrl.model.shape import Lora, ModelShape
from hpcrl.runtime.groups import RoleGroups

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan

    from hpcrl.engine.checkpoint.snapshot import RoleSnapshots
    from hpcrl.workers.team import Team

SEQUENCE = ("input_ids", "response_mask", "pictures?", "sequence_starts?")  # columns that the model runs on


@dataclass(frozen=True)
class Updates:
    """Division of a step's samples into optimizer steps.

    mini_batch_size: prompts per optimizer step. epochs: passes. Membership is keyed by (seed, step, pass).
    """

    mini_batch_size: int
    epochs: int
    shuffle: bool
    seed: int

    def mini_batches(self, batch: DataProto) -> Iterator[DataProto]:
        """This replica's rows of every mini-batch, in order; a part may be empty."""
        for rows in self.rows(batch):
            yield batch[rows]

    def rows(self, batch: DataProto) -> Iterator[np.ndarray]:
        """The same as places in `batch`, int64."""
        num_prompts, step = batch.meta_info["num_prompts"], batch.meta_info["step"]
        for epoch in range(self.epochs):
            of_prompt = mini_batch_of(
                num_prompts, self.mini_batch_size, seed=self.seed, step=step, ppo_epoch=epoch, shuffle=self.shuffle
            )
            of_row = of_prompt[batch.samples["prompt"]]
            for index in range(int(of_prompt.max()) + 1):
                yield np.flatnonzero(of_row == index)


class ModelWorker(Worker):
    """A megatron model and, if it is trained, its optimizer, according to `spec` and the role's config section."""

    def __init__(
        self,
        groups: RoleGroups,
        shape: ModelShape,
        config: Config,
        derived: Any = None,
        total_steps: int = 0,
        *,
        optim: OptimConfig | None = None,
        total_updates: int | None = None,
        lora: Lora | None = None,
        exact: bool = False,
    ) -> None:
        """Build the role's model.

        Args:
            optim: section of the optimizer; None: that of the role.
            total_updates: optimizer steps of the run, for the learning-rate schedule; None: one per step.
            lora: adapters, the only weights that are trained then.
            exact: compute log-probs with the bits of the rollout engine's.
        """
        super().__init__(groups.layout, groups.rank)
        self.config = config
        spec, model = self.spec, self.spec.architecture(config)
        optim = optim or (spec.config_of(config).optim if spec.trains else None)
        self.max_tokens = spec.token_budget(config)
        self.groups = groups
        self._save_memory: list[torch.Tensor] = []
        self._snapshots: RoleSnapshots | None = None
        self.engine = TrainEngine(
            shape,
            groups,
            head=spec.head or "lm",
            dtype=DTYPES[model.dtype],
            optim=optim,
            total_steps=total_steps if total_updates is None else total_updates,
            seed=config.run.seed,
            exact=exact,
            recompute=config.model.recompute if optim is not None else None,
            te=config.model.transformer_engine,
            moe=config.model.moe if optim is not None else None,
            ddp=config.model.ddp,
            gradient_accumulation_fusion=config.model.gradient_accumulation_fusion,
            lora=lora,
            head_chunk_tokens=config.trainer.head_chunk_tokens,
            offload=offloaded(config, spec),
            on_micro_batch=self.tick,
        )

    @classmethod
    def build(cls, team: Team, role: str) -> ModelWorker | None:
        groups = team.groups.get(role)
        if groups is None:
            return None
        return cls(groups, team.shape_of(role), team.config, team.derived, team.total_steps)

    def host_buffers(self) -> int:
        """Bytes of host memory for offloaded state and for the copy of a save."""
        return self.engine.offload.host_bytes + sum(tensor.nbytes for tensor in self._save_memory)

    @register(Dispatch.ONE_TO_ALL)
    def begin_save(self, folder: str, key: str, scratch: str | None = None, keep_memory: bool = False) -> SavePlan:
        """Start writing the role's current weights and optimizer state to <folder>/<role>; `folder` exists.

        Later updates do not affect it. A SavedPart is published under <key>/<role>/<rank> when this rank's part is
        written. Offloaded state is on the device until it is copied.

        Args:
            scratch: see `checkpoint.scratch`.
            keep_memory: keep the copy's memory for the next save.
        """
        from hpcrl.engine.checkpoint.sharded_save import ShardedSave  # a second of imports, for runs that save

        memory, path = self._save_memory if keep_memory else [], Path(folder) / self.groups.role
        report, tick = self._reporter(key), self.status.tick_background
        with self.engine.offload.on_device("parameters", "optimizer"):
            return ShardedSave(self.engine, path, self.groups, report, scratch, memory, tick).plan

    @register(Dispatch.ONE_TO_ALL)
    def begin_snapshot(self, key: str, generation: int) -> SavePlan | None:
        """As `begin_save`, into this generation's files in memory of the nodes. Returns the plan if they are new."""
        from hpcrl.engine.checkpoint.snapshot import RoleSnapshots

        if self._snapshots is None:
            assert self.context.world.node_memory is not None
            self._snapshots = RoleSnapshots(self.engine, self.groups, self.context.world.node_memory)
        with self.engine.offload.on_device("parameters", "optimizer"):
            return self._snapshots.begin(generation, self._reporter(key))

    def _reporter(self, key: str) -> Callable[[SavedPart], None]:
        """What publishes this rank's part under <key>/<role>/<rank>."""
        name = f"{key}/{self.groups.role}/{self.rank}"
        return lambda part: self.context.publish(name, part.to_json())

    @register(Dispatch.ONE_TO_ALL)
    def load(self, folder: str, role: str | None = None, weights_only: bool = False) -> None:
        """Read a checkpoint, of any layout. With `weights_only`, weights of another role's model or of a Hugging Face
        directory can be read; a head that the other model lacks keeps its initial weights. A model that is trained
        starts with adapters of its own, and rejects a checkpoint that has some."""
        if weights_only and is_hugging_face(Path(folder)):
            self.engine.load_hugging_face(open_weights(Path(folder), self.engine.shape))
            return
        from hpcrl.engine.checkpoint.sharded_load import load_sharded

        source, whole = Path(folder) / (role or self.groups.role), not weights_only
        adapters = whole or self.engine.optimizer is None
        with self.engine.offload.on_device("parameters", "optimizer"):
            load_sharded(self.engine, source, optimizer=whole, strict=whole, adapters=adapters)

    @register(Dispatch.ONE_TO_ALL)
    def load_frozen(self, folder: str) -> None:
        """Load the weights of a model that is not trained: those of a policy, from a checkpoint or a Hugging Face
        directory."""
        self.load(folder, role="actor", weights_only=True)

    def log_prob_column(self, name: str, batch: DataProto, *, max_tokens: int, temperature: float) -> DataProto:
        """Column `name` with the log-probs of the response tokens, on the leader."""
        outputs = self.engine.log_probs(batch, max_tokens=max_tokens, temperature=temperature)
        return DataProto({name: outputs["log_probs"]}) if self.is_leader else DataProto()

    def train(
        self, mini: DataProto, objective: Callable[[LossNorm], Callable], *, loss_scale_factor: float, **options: Any
    ) -> dict[str, Metric]:
        """One optimizer step on a mini-batch; `objective(norm)` is the loss, normalised by the global mini-batch.

        Without samples on any replica there is no step and no metrics, because Adam would still move the weights.
        """
        norm = self.global_norm(mini, loss_scale_factor)
        if norm.global_batch_size == 0:
            return {}
        metrics = self.engine.train(mini, loss=objective(norm), **options)
        # The engine's own are equal on all ranks, so their mean over replicas is what they are.
        own = {f"{self.groups.role}/{name}": Mean(it, 1.0) for name, it in metrics.items() if isinstance(it, float)}
        return to_floats({name: it for name, it in metrics.items() if not isinstance(it, float)} | own)

    def global_norm(self, mini: DataProto, loss_scale_factor: float) -> LossNorm:
        """Tokens and sequences of the mini-batch over all replicas."""
        counts = torch.tensor([int(training_mask(mini).sum()), len(mini)], dtype=torch.float64)
        num_tokens, num_sequences = self.sum_over_replicas(counts).tolist()
        return LossNorm(num_tokens, num_sequences, loss_scale_factor)

    def sum_over_replicas(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of x over the data-parallel replicas, on every rank; x is on the host."""
        x = x.clone()
        if self.groups.layout.dp > 1:
            dist.all_reduce(x, group=self.groups.dp)
        return x
