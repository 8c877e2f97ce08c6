"""policy, from preferences: DPO and its relatives"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from hpcrl.algorithms.preference_losses import PREFERENCE_LOSSES, PreferenceParameters
from hpcrl.batch.data_proto import DataProto
from hpcrl.config.derive import RoleLayouts
from hpcrl.config.roles import ACTOR, REF, RoleSpec
from hpcrl.config.schema import Config, OptimConfig
from hpcrl.config.yaml_core import ConfigError
from hpcrl.run.pairs import PairsConfig, PairsJob

if TYPE_CHECKING:
    from hpcrl.run.run import Run


class PreferenceConfig(PairsConfig, PreferenceParameters):
    """`hpcrl preference`: DPO and its relatives, on pairs of answers in data.train_files."""

    loss_type: str = Field("sigmoid", description="name of a registered preference loss; sigmoid is DPO")
    optim: OptimConfig = Field(default_factory=lambda: OptimConfig(lr=1e-6), description="optimizer")


class Preference(PairsJob):
    """The policy learns which answer of a pair is better."""

    name = label = "preference"
    section = PreferenceConfig
    memory_advice = (
        "a smaller preference.max_token_len_per_gpu, model.recompute.granularity=full, a larger placement.actor.tp"
    )

    def loop(self, run: Run) -> None:
        data, ref, actor = run.roles("data", "ref", "actor")
        for step in run.steps():  # between two steps: wait, log, evaluate, save, stop if asked to
            batch = data.load(self.next_pairs(run, step))  # chosen and rejected, next to each other
            batch = batch | ref.compute_ref_log_prob(batch)  # nothing, where the loss needs no reference
            actor.update(batch)

    @classmethod
    def check(cls, config: Config, num_ranks: int) -> RoleLayouts:
        """It trains on the actor's ranks. The reference of a policy with adapters is the policy without them."""
        own = config.section("preference")
        reference = PREFERENCE_LOSSES.get(own.loss_type).reference and config.model.lora_rank == 0
        if own.loss_type == "exo_pair" and own.label_smoothing == 0:
            raise ConfigError("preference.loss_type=exo_pair needs preference.label_smoothing above 0, such as 0.001")
        return cls.check_pairs(config, [ACTOR, REF] if reference else [ACTOR], num_ranks)

    @property
    def needs_reference(self) -> bool:
        return PREFERENCE_LOSSES.get(self.own.loss_type).reference

    def with_reference(self, run: Run, batch: DataProto) -> DataProto:
        if not self.needs_reference:
            return batch
        return batch.union(run.controller[self.stands_for("ref")].compute_ref_log_prob(batch).get())

    def roles(self) -> list[RoleSpec]:
        actor = replace(ACTOR, worker="hpcrl.workers.preference:PreferenceActorWorker")
        ref = replace(REF, worker="hpcrl.workers.preference:PreferenceRefWorker")
        data = RoleSpec("data", "hpcrl.workers.supervised:PreferenceDataWorker", on=("actor",))
        return [actor, *([ref] if "ref" in self.derived.roles else []), data, *self.export_roles]

    def stands_for(self, role: str) -> str:
        return "actor" if role == "ref" and self.needs_reference and "ref" not in self.derived.roles else role

    def progress(self, metrics: dict[str, float]) -> dict[str, float]:
        shown = {"loss": metrics["train/loss"], "accuracy": metrics["rewards/accuracies"]}
        return shown | ({"val_accuracy": metrics["val/rewards/accuracies"]} if "val/loss" in metrics else {})


JOB = Preference
