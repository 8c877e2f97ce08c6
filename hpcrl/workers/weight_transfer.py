"""The policy's weights to the rollout engine, and to files in the formats of Hugging Face and PEFT."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hpcrl.config.roles import EXPORT, REFIT, shares_weights
from hpcrl.config.schema import Config
from hpcrl.controller.register import Dispatch, Worker, register
from hpcrl.engine.checkpoint.store import fsync
from hpcrl.engine.refit.planner import Resharding
from hpcrl.engine.refit.refit import Refit, RefitReport
from hpcrl.engine.refit.transports import nodes_of
from hpcrl.model.build import DTYPES
from hpcrl.model.hf_export import ADAPTER_WEIGHTS, peft_shards, plan_files
from hpcrl.model.hf_files import whole_tensors
from hpcrl.model.params import Shard, quantized_names
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.engine import engine_of
from hpcrl.runtime import accelerator, platform
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.world import World, before_mpi_finalize
from hpcrl.workers.model_worker import ModelWorker
from hpcrl.workers.rollout import RolloutWorker

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcrl.rollout.protocol import RolloutEngine
    from hpcrl.workers.team import Team


class RefitWorker(Worker):
    """Copies the actor's weights to the engine's buffers, on the ranks of both.

    With `alias` the engine uses the actor's own tensors where they are equal. Then actor and rollout must take turns,
    the actor's parameters stay on the device, and it has no adapters, whose updates are in none of its tensors.
    """

    spec = REFIT

    @classmethod
    def build(cls, team: Team, role: str) -> RefitWorker | None:
        layouts, workers = team.layouts, team.workers
        source, target = team.specs[role].on
        refit = make_refit(team.world, team.config, team.inputs.shape, layouts[source], layouts[target])
        if refit is None:
            return None
        actor, rollout = workers.get(source), workers.get(target)
        alias = shares_weights(team.config) and "shared_weights" in team.config.engine.supports
        return cls(layouts[role], team.world.rank, refit, actor, rollout, alias=alias)  # type: ignore[arg-type]

    def __init__(
        self,
        layout: Layout,
        rank: int,
        refit: Refit,
        actor: ModelWorker | None,
        rollout: RolloutWorker | None,
        *,
        alias: bool,
    ) -> None:
        super().__init__(layout, rank)
        self.refit = refit
        self.actor = actor
        self.rollout = rollout
        self.alias = alias

    @register(Dispatch.ONE_TO_ALL)
    def update_weights(self) -> RefitReport:
        """Run the refit. Returns every rank's report, in rank order."""
        source: Mapping[str, Tensor] = self.actor.engine.merged_shards() if self.actor else {}
        engine: RolloutEngine | None = self.rollout.engine if self.rollout else None
        with (
            self.actor.engine.offload.on_device("parameters") if self.actor else nullcontext(),
            engine.updating_weights() if engine else nullcontext(),
        ):
            if self.alias and self.actor and engine:
                self.refit.share(source, engine.weights(), engine.adopt)
            return self.refit.run(source, engine.weights() if engine else {})


def make_refit(world: World, config: Config, shape: ModelShape, actor: Layout, rollout: Layout) -> Refit | None:
    """This rank's part of the refit, None where it has neither side. Collective over the world."""
    dtype = DTYPES[config.rollout.dtype or config.model.dtype]
    nodes = tuple(nodes_of(world.comm))
    resharding = Resharding(shape, actor, rollout, dtype.itemsize, nodes=nodes, engine_shards=engine_of(config).layout)
    ranks = sorted({*actor.ranks, *rollout.ranks})
    device_group = dist.new_group(ranks, timeout=world.nccl_timeout) if accelerator.has_nccl() else None
    if world.rank not in ranks:
        return None
    options = config.rollout.checkpoint_engine
    bucket, verify = options.update_weights_bucket_megabytes * 2**20, options.verify
    refit = Refit(
        resharding,
        world.comm,
        world.rank,
        dtype,
        bucket_bytes=bucket,
        verify=verify,
        device_group=device_group,
        quantized=quantized_names(shape, config.rollout.quantization),
    )
    before_mpi_finalize(refit.close)
    return refit


Problem = tuple[int | None, str, str]  # the arguments of an OSError


class ExportWorker(Worker):
    """Writes the policy to files. All ranks of the policy write, so none holds more than its share of the tensors."""

    spec = EXPORT

    @classmethod
    def build(cls, team: Team, role: str) -> ExportWorker | None:
        policy = team.workers.get(team.specs[role].on[0])
        return cls(policy, team.world.comm) if isinstance(policy, ModelWorker) else None

    def __init__(self, policy: ModelWorker, comm: MPI.Intracomm) -> None:
        super().__init__(policy.groups.layout, policy.groups.rank)
        self.policy = policy
        self.comm = comm

    @register(Dispatch.ONE_TO_ALL)
    def shape(self) -> ModelShape:
        return self.policy.engine.shape

    @register(Dispatch.ONE_TO_ALL)
    def write(self, folder: str) -> Problem | None:
        """Write this rank's files into `folder`, which exists; adapters are merged."""
        engine, ranks = self.policy.engine, self.layout.ranks
        place = ranks.index(self.rank)
        files = [f for f in plan_files(engine.shape, engine.dtype.itemsize, len(ranks)) if f.writer == place]
        tensors = self._empty(shard for file in files for shard in file.shards)
        self._bring(engine.merged_shards(), tensors, Layout(ranks), destination_format="hugging_face")
        its = {Path(folder) / file.name: [shard.local_name for shard in file.shards] for file in files}
        return self._save(its, tensors)

    @register(Dispatch.ONE_TO_ALL)
    def write_adapter(self, folder: str) -> Problem | None:
        """The first rank writes PEFT's file of all adapters into `folder`, which exists."""
        engine, writer = self.policy.engine, self.layout.ranks[0]
        assert engine.lora is not None
        tensors = self._empty(peft_shards(engine.shape, engine.lora) if self.rank == writer else ())
        self._bring(engine.named_shards(), tensors, Layout((writer,)), destination_format="peft", lora=engine.lora)
        return self._save({Path(folder) / ADAPTER_WEIGHTS: list(tensors)} if tensors else {}, tensors)

    def _empty(self, shards: Iterable[Shard]) -> dict[str, torch.Tensor]:
        dtype, device = self.policy.engine.dtype, platform.device()
        return {shard.local_name: torch.empty(shard.local_shape, dtype=dtype, device=device) for shard in shards}

    def _bring(
        self, source: Mapping[str, torch.Tensor], tensors: dict[str, torch.Tensor], writers: Layout, **options: Any
    ) -> None:
        """Fill `tensors` from all ranks' `source`."""
        engine = self.policy.engine
        resharding = Resharding(engine.shape, self.layout, writers, engine.dtype.itemsize, **options)
        group = self.policy.groups.pgc.intra_dist_opt if accelerator.has_nccl() else None
        refit = Refit(resharding, self.comm, self.rank, engine.dtype, verify="always", device_group=group)
        try:
            with engine.offload.on_device("parameters"):
                refit.run(source, tensors)
        finally:
            refit.close()

    def _save(self, files: Mapping[Path, list[str]], tensors: dict[str, torch.Tensor]) -> Problem | None:
        """Write the named tensors to each file, and free them. Returns the arguments of an OSError, or None."""
        for path, names in files.items():
            try:
                whole = whole_tensors({name: tensors.pop(name).cpu() for name in names})
                save_file(whole, path, metadata={"format": "pt"})
                del whole  # before the next file's tensors are copied
                fsync(path)
            except (OSError, SafetensorError) as error:
                said = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())
                message = f"{said} (rank {self.rank} on {socket.gethostname()})"
                return getattr(error, "errno", None), message, str(path.parent)
            self.tick()
        return None
