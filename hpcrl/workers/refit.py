"""The refit, which brings the actor's weights into the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from hpcrl.config.roles import REFIT, shares_weights
from hpcrl.config.schema import Config
from hpcrl.controller.register import Dispatch, Worker, register
from hpcrl.grid.layout import Layout
from hpcrl.model.shape import ModelShape
from hpcrl.reshard.planner import Resharding
from hpcrl.reshard.refit import Refit, RefitReport
from hpcrl.reshard.transports import nodes_of
from hpcrl.runtime import accelerator
from hpcrl.runtime.world import World, before_mpi_finalize
from hpcrl.workers.model_worker import DTYPES, ModelWorker
from hpcrl.workers.rollout import RolloutWorker

if TYPE_CHECKING:
    from hpcrl.rollout.protocol import RolloutEngine
    from hpcrl.workers.team import Team


class RefitWorker(Worker):
    """Copies the actor's weights into the engine's buffers, on the ranks of both.

    With `alias` the engine takes the actor's own tensors where they are the same: actor and rollout must take turns,
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
        return cls(
            layouts[role],
            team.world.rank,
            refit,
            workers.get(source),  # type: ignore[arg-type]
            workers.get(target),  # type: ignore[arg-type]
            alias=shares_weights(team.config),
        )

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
        """Every rank's report, in rank order."""
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
    resharding = Resharding(
        shape,
        actor,
        rollout,
        dtype.itemsize,
        nodes=nodes,
        destination_format="tensorrt_llm" if config.rollout.engine == "tensorrt_llm" else "megatron",
    )
    ranks = sorted({*actor.ranks, *rollout.ranks})
    device_group = dist.new_group(ranks, timeout=world.nccl_timeout) if accelerator.has_nccl() else None
    if world.rank not in ranks:
        return None
    options = config.rollout.checkpoint_engine
    refit = Refit(
        resharding,
        world.comm,
        world.rank,
        dtype,
        bucket_bytes=options.update_weights_bucket_megabytes * 2**20,
        verify=options.verify,
        device_group=device_group,
    )
    before_mpi_finalize(refit.close)
    return refit


def refit_metrics(reports: Sequence[RefitReport]) -> dict[str, float]:
    """Of one refit, from the reports of all ranks: bytes are summed, times and memory are those of the worst rank."""
    seconds = max(report.seconds for report in reports)
    received, copied, aliased = (
        sum(getattr(report, name) for report in reports) for name in ("bytes_received", "bytes_copied", "bytes_aliased")
    )
    return {
        "perf/refit/seconds": seconds,
        "perf/refit/checksum_seconds": max(report.checksum_seconds for report in reports),
        "perf/refit/gib_received": received / 2**30,
        "perf/refit/gib_copied": copied / 2**30,
        "perf/refit/gib_aliased": aliased / 2**30,
        "perf/refit/gb_per_s": (received + copied) / seconds / 1e9,
        "perf/refit/peak_extra_mib": max(report.peak_extra_bytes for report in reports) / 2**20,
    }
