"""What every rank of `hpcrl sft` and `hpcrl preference` holds in each phase of a step. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hpcrl.algorithms.preference_losses import PREFERENCE_LOSSES, PreferenceLoss
from hpcrl.config.derive import JobDescription, RoleLayouts, check_lengths
from hpcrl.config.roles import ACTOR, PLACED, REF, ROLLOUT, Part, RoleSpec, offloaded
from hpcrl.config.schema import Config
from hpcrl.forecast.memory.memory import Phase, Place, TrainingPlan

if TYPE_CHECKING:
    from hpcrl.forecast.memory.activations import Pass

JOBS = ("sft", "preference")


def plan_of(described: JobDescription, config: Config) -> TrainingPlan:
    """The memory of a job."""
    if described.file is None and described.name in JOBS:
        return SupervisedPlan(config, (), described)
    return TrainingPlan(config, tuple(described.own_specs()))


@dataclass(frozen=True)
class SupervisedPlan(TrainingPlan):
    """The memory of a job that trains the policy on given answers; of DPO with the reference."""

    described: JobDescription | None = None

    @cached_property
    def derived(self) -> RoleLayouts:  # type: ignore[override]
        job, described = self.config.job, self.described
        assert described is not None
        return described.check(self.config, job.nodes * job.ntasks_per_node)

    @property
    def steps(self) -> int | None:
        own: int | None = self.own.total_training_steps
        return own

    @property
    def longest(self) -> int:
        return check_lengths(self.config)

    @property
    def least_sequences(self) -> int:
        """The two of a pair."""
        return 2 if self._loss is not None and self._loss.paired else 1

    @property
    def name(self) -> str:
        assert self.described is not None
        return self.described.name

    @property
    def own(self) -> Any:
        """The job's config section."""
        return self.config.section(self.name)

    @property
    def _loss(self) -> PreferenceLoss | None:
        return PREFERENCE_LOSSES.get(self.own.loss_type) if self.name == "preference" else None

    @cached_property
    def known(self) -> dict[str, RoleSpec]:
        """All roles by name; the policy's optimizer and micro-batches are those of the job's section."""
        actor = replace(ACTOR, section=self.name, max_tokens="max_token_len_per_gpu")
        return {**{spec.name: spec for spec in PLACED}, ACTOR.name: actor}

    def away(self, role: str) -> tuple[Part, ...]:
        return offloaded(self.config, next(spec for spec in PLACED if spec.name == role))

    @cached_property
    def phases(self) -> list[Phase]:
        return list(self._phases())

    def _phases(self) -> Iterator[Phase]:
        if ROLLOUT.name in self.derived.roles:  # evaluations
            yield Phase("rollout", ROLLOUT.name, "generate")
        if REF.name in self.derived.roles:
            yield Phase("ref", REF.name, "forward", self._pass(REF.name))
        elif self._loss is not None and self._loss.reference:
            yield Phase("ref", ACTOR.name, "forward", self._pass(ACTOR.name))
        yield Phase("update_actor", ACTOR.name, "train", self._pass(ACTOR.name))
        if ROLLOUT.name in self.derived.roles:
            yield Phase("refit", ROLLOUT.name, "refit")
        yield Phase("save_actor", ACTOR.name, "save")

    def _pass(self, role: str) -> Pass:
        samples = self.own.batch_size * (1 if self._loss is None else 2)
        return self._work(role, self.specs[role].token_budget(self.config), samples, entropy=False)

    def pictures_on_host(self, place: Place) -> int:
        return 0  # they stay in their files, but for those of a step
