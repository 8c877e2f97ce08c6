"""PPO, GRPO and relatives"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrl.algorithms.kl import REWARD_KL_PENALTY, KLController
from hpcrl.algorithms.pf_ppo import pf_ppo_rows
from hpcrl.config import derive
from hpcrl.config import roles as specs
from hpcrl.config.derive import Derived
from hpcrl.config.schema import Config
from hpcrl.data.sampler import Sampler, make_sampler
from hpcrl.run.calls import PendingBatch, Role
from hpcrl.run.job import TrainingJob
from hpcrl.run.job_config import in_section
from hpcrl.run.job_parts import Models, SavedState
from hpcrl.run.performance import TrainReport
from hpcrl.run.rollouts.choice import assign_to_replicas, make_rollout_source
from hpcrl.run.rollouts.source import RolloutSource
from hpcrl.run.validation import TrainValidation
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.job import run_directory

if TYPE_CHECKING:
    from hpcrl.batch.data_proto import DataProto
    from hpcrl.run.run import Run
    from hpcrl.workers.team import Inputs

log = logging.getLogger(__name__)

# phases of a step (`timing_s/<phase>`, `@register(phase=...)`), in the order of the loop
FORWARD_PASSES = ("old_log_prob", "ref", "teacher", "values", "adv")
UPDATES = ("update_critic", "update_actor", "update_weights", "dump_rollout_generations")
PF_PPO_STREAM = 0x7066  # keeps these random numbers apart from others keyed by the same seed


class TrainModels(Models):
    def stands_for(self, role: str) -> str:
        return "actor" if role == "ref" and self.job.derived.ref_in_actor else role

    def frozen(self) -> dict[str, str]:
        config, weights = self.job.config, super().frozen()
        policy = config.model.init_from or config.model.path
        if config.distillation.enabled and policy is not None:
            weights.setdefault("teacher", policy)
        if "judge" in self.job.derived.roles and (judge := specs.judge_weights(config)) is not None:
            weights["judge"] = judge
        return weights


class TrainState(SavedState):
    def save(self, step: int) -> dict[str, Any]:
        return {"kl_ctrl": self.job.kl_controller.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.job.kl_controller.load_state_dict(state["kl_ctrl"])


class Train(TrainingJob):
    """PPO (Schulman et al. 2017, algorithm 1); GRPO and its relatives are the same loop without a critic."""

    name = "train"
    saves_last = False
    report_class, validation_class = TrainReport, TrainValidation
    models_class, saved_state_class = TrainModels, TrainState
    derived: Derived
    sampler: Sampler  # of training prompts
    rollouts: RolloutSource  # on rank 0, from `set_up` on
    kl_controller: KLController  # on rank 0, from `set_up` on

    def loop(self, run: Run) -> None:
        """Rank 0's part of the job; the roles' ranks run what it calls.

        A call returns at once: its batch, with the columns that it adds still pending. `|` joins such batches, so calls
        of roles on different ranks overlap. A call waits for the batch that it is given, and `.get()` waits for all
        columns. A role that the job does without adds none. A step that the run stops in is made again by the next
        start; from its first update on it is completed.
        """
        actor, critic, ref, teacher = run.roles("actor", "critic", "ref", "teacher")
        rollouts, kl = self.rollouts, self.kl_controller
        for step in run.steps():  # between two steps: wait for all calls, log, validate, save, stop if asked to
            batch = rollouts.next(step)  # wait for samples: prompts -> responses -> scores; None: the run stops
            if batch is None or run.stops_before(*FORWARD_PASSES):
                continue
            self.balance_batch(run, batch)
            pending = (
                self.compute_old_log_probs(actor, batch)
                | ref.compute_ref_log_prob(batch)
                | teacher.compute_teacher_log_prob(batch)
                | critic.compute_values(batch)
            )
            batch = actor.compute_advantage(pending, kl_coef=kl.value).get()
            if run.stops_before(*UPDATES):
                continue
            self.update_kl_coef(run, batch)
            train_batch = self.resample(batch) if self.config.algorithm.use_pf_ppo else batch
            critic.update_critic(train_batch)
            pending = PendingBatch(batch)
            if self.trains_actor(step):
                pending |= actor.update_actor(train_batch)  # adds old log-probs, if it computes them
            self.compute_variance_proxy(run, actor, pending)
            rollouts.update_weights(step)  # from the actor to the rollout engine
            run.archive(pending)

    def trains_actor(self, step: int) -> bool:
        """False in the first trainer.critic_warmup steps of a job with a critic."""
        return step > self.config.trainer.critic_warmup or not self.derived.needs_critic

    def balance_batch(self, run: Run, batch: DataProto) -> None:
        """Assign samples to replicas."""
        run.log(assign_to_replicas(batch, self.config, self.derived))

    def compute_old_log_probs(self, actor: Role, batch: DataProto) -> PendingBatch:
        """The batch with the policy's log-probs before the update; without, if the step's only update computes them."""
        # A recorded batch may have any number of prompts.
        is_one_update = batch.meta_info["num_prompts"] <= self.config.actor.ppo_mini_batch_size
        if self.derived.old_log_prob_in_update and is_one_update and self.trains_actor(batch.meta_info["step"]):
            return PendingBatch(batch)
        return actor.compute_log_prob(batch)

    def update_kl_coef(self, run: Run, batch: DataProto) -> None:
        """Adapt the weight of the KL penalty in the reward, if there is one."""
        penalty = run.metrics.get(REWARD_KL_PENALTY)
        if penalty is not None:
            self.kl_controller.update(penalty, len(batch))

    def resample(self, batch: DataProto) -> DataProto:
        """PF-PPO: as many rows as the batch has, drawn with replacement by their scores."""
        pf_ppo, step = self.config.algorithm.pf_ppo, batch.meta_info["step"]
        key = np.random.SeedSequence(self.config.run.seed % 2**64, spawn_key=(PF_PPO_STREAM, step))
        uniforms = (np.random.Philox(key).random_raw(len(batch)) >> np.uint64(11)) * 2.0**-53
        return batch[pf_ppo_rows(batch.samples["score"], uniforms, pf_ppo)]

    def compute_variance_proxy(self, run: Run, actor: Role, batch: PendingBatch) -> None:
        """Compute variance_proxy/*. Waits for the update, whose gradient norm it needs: None in a warm-up step."""
        if self.derived.needs_sum_pi_squared:
            from hpcrl.engine.engine import GRAD_NORM  # imports torch

            run.wait()
            actor.variance_proxy(batch, run.metrics.get(f"actor/{GRAD_NORM}"))

    @classmethod
    def prepare(cls, config: Config) -> Config:
        if config.job.machine is not None:
            from hpcrl.machine.machine_file import read_machine

            read_machine(config.job.machine)  # an invalid one is an error before anything is built
        return super().prepare(config)

    @classmethod
    def check(cls, config: Config, num_ranks: int) -> Derived:
        return derive.check(config, num_ranks, own_roles=cls.own_specs())

    @classmethod
    def check_with_torch(cls, config: Config, num_ranks: int) -> Derived:
        from hpcrl.workers.actor_objective import ActorObjective

        derived = cls.check(config, num_ranks)
        in_section("actor", lambda: ActorObjective(config, derived))
        return derived

    @classmethod
    def without_effect(cls, config: Config) -> list[str]:
        algorithm, lines = config.algorithm, []
        if config.trainer.rollouts_from is not None and algorithm.filter_groups.enable:
            lines.append(
                "trainer.rollouts_from replays all recorded prompts: algorithm.filter_groups drops none of them"
            )
        if config.data.gen_batch_size is not None and not algorithm.filter_groups.enable:
            lines.append("data.gen_batch_size is read only with algorithm.filter_groups.enable=true")
        if algorithm.gdpo_reward_keys and algorithm.adv_estimator != "gdpo":
            lines.append(f"algorithm.gdpo_reward_keys: adv_estimator={algorithm.adv_estimator} does not read them")
        return lines

    def read_inputs(self) -> Inputs:
        from hpcrl.workers.team import read_training_inputs

        inputs = read_training_inputs(self.config, self.world)
        self._check_recording()
        self.sampler = make_sampler(inputs.prompts["train"], self.config.data, self.config.run.seed)
        return inputs

    def roles(self) -> list[specs.RoleSpec]:
        models = [
            spec
            for spec in (specs.ACTOR, specs.CRITIC, specs.REF, specs.TEACHER, specs.REWARD)
            if spec.name in self.derived.roles
        ]
        judge = [specs.JUDGE] if "judge" in self.derived.roles else []
        return [*models, *self.models.exported, specs.ARCHIVE, specs.ROLLOUT, *judge, specs.SCORER, specs.REFIT]

    def total_steps(self) -> int:
        trainer, prompts = self.config.trainer, len(self.inputs.prompts["train"])
        return trainer.total_training_steps or self.steps_for_epochs(prompts, trainer.total_epochs)

    @property
    def rows_per_step(self) -> int:  # type: ignore[override]
        return self.config.data.train_batch_size

    def set_up(self, run: Run) -> None:
        prompts = self.inputs.prompts
        log.info(
            "%d steps over %d prompts; %d filtered out as too long",
            *(run.total_steps, len(prompts["train"]), prompts["train"].num_filtered),
        )
        self.rollouts = run.rollouts = make_rollout_source(run, self.derived, self.sampler, self.inputs.tokenizer)
        self.kl_controller = KLController(self.config.algorithm.kl_ctrl)

    def _check_recording(self) -> None:
        """Raise InputError if the recording is missing or the run's own, which would be overwritten."""
        recorded = self.config.trainer.rollouts_from
        if recorded is None:
            return
        if not Path(recorded).is_dir():
            raise InputError(f"trainer.rollouts_from={recorded}: no such folder; name the rollouts/ folder of a run")
        if Path(recorded).resolve().is_relative_to(run_directory(self.config).resolve()):
            raise InputError(f"trainer.rollouts_from={recorded} is this run's own folder; choose another run.name")


JOB = Train
