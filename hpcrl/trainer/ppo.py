"""PPO, and GRPO and its relatives, which are the same loop without a critic."""

from __future__ import annotations

import logging
import re
import resource
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpcrl.algorithms.kl import make_kl_controller
from hpcrl.algorithms.metrics import finish, finish_over_steps, merge
from hpcrl.algorithms.pf_ppo import pf_ppo_rows
from hpcrl.batch.data_proto import DataProto
from hpcrl.config.derive import Derived
from hpcrl.config.schema import Config
from hpcrl.controller.controller import Controller, Future, run_program
from hpcrl.data.order import steps_for_epochs
from hpcrl.data.sampler import Sampler, make_sampler
from hpcrl.model.flops import peak_of
from hpcrl.roles.team import Inputs, build_team, read_inputs
from hpcrl.runtime import accelerator
from hpcrl.runtime.exits import DONE, InputError
from hpcrl.runtime.job import run_directory
from hpcrl.runtime.world import World
from hpcrl.telemetry.archive import discard_from
from hpcrl.trainer.assignment import assign_to_replicas
from hpcrl.trainer.durable_rollouts import DurableRollouts, origin_of
from hpcrl.trainer.engine_weights import EngineWeights
from hpcrl.trainer.experience import BetweenSteps, Experience, write_samples
from hpcrl.trainer.mfu import mfu_metrics
from hpcrl.trainer.off_policy import idle_metrics
from hpcrl.trainer.one_step_off import OneStepOff
from hpcrl.trainer.run import Run, Start, find_start, start_slice, without_nan
from hpcrl.trainer.stragglers import Stragglers
from hpcrl.trainer.stream import Stream
from hpcrl.trainer.validation import Validator

log = logging.getLogger(__name__)

EXPERIENCE: dict[str, type[Experience]] = {
    "sync": Experience,
    "one_step_off": OneStepOff,
    "bounded_staleness": Stream,
}
GLANCE = {  # at the progress of a run
    "score": "critic/score/mean",
    "length": "response_length/mean",
    "entropy": "actor/entropy",
    "ratio_kl": "actor/ppo_kl",
}
PF_PPO_STREAM = 0x7066  # keeps these numbers apart from others keyed by the same seed


class State(NamedTuple):
    """The loop between two steps. metrics: of the step that has ended."""

    loop: dict[str, Any]
    experience: BetweenSteps
    metrics: dict[str, float]


def run(world: World, config: Config, derived: Derived) -> int:
    """`hpcrl train` on every rank."""
    inputs = world.run_collectively(lambda: read_inputs(config, world))
    world.run_collectively(lambda: check_recording(config))
    sampler = world.run_collectively(lambda: make_sampler(inputs.prompts["train"], config.data, config.run.seed))
    start = find_start(
        world, config, needs_ref="ref" in derived.roles, frozen=frozen_weights(config, derived), job="train"
    )
    prompts, batch_size = len(inputs.prompts["train"]), config.data.train_batch_size
    total_steps = config.trainer.total_training_steps or steps_for_epochs(
        prompts, batch_size, config.trainer.total_epochs
    )
    start_slice(world, config, start, total_steps)
    team = build_team(world, config, derived, inputs, total_steps)
    code = run_program(
        world,
        team.workers,
        team.kinds,
        team.layouts,
        lambda controller: PPOTrainer(world, controller, config, derived, inputs, start, sampler, total_steps).fit(),
    )
    return DONE if code is None else code  # rank 0 knows


class PPOTrainer:
    """The controller's program, on rank 0."""

    def __init__(
        self,
        world: World,
        controller: Controller,
        config: Config,
        derived: Derived,
        inputs: Inputs,
        start: Start,
        sampler: Sampler,
        total_steps: int,
    ) -> None:
        self.controller = controller
        self.config = config
        self.derived = derived
        self.inputs = inputs
        self.start = start
        self.total_steps = total_steps
        label = "ppo" if derived.needs_critic else config.algorithm.adv_estimator
        self.run = Run(world, controller, config, "train", label, start, total_steps)
        log.info(
            "%d steps over %d prompts; %d filtered out as too long",
            total_steps,
            len(inputs.prompts["train"]),
            inputs.prompts["train"].num_filtered,
        )
        self.timers = self.run.timers
        eos = (int(inputs.tokenizer.eos_token_id),)
        self.weights = EngineWeights(controller, self.timers)
        self.peak_flops = peak_of(gpu) if (gpu := accelerator.name_of(world.device)) else None
        mode = config.async_training.mode
        self.experience = EXPERIENCE[mode](
            controller, config, derived, sampler, self.timers, eos, self.weights, total_steps
        )
        if mode != "sync":
            log.info("async_training.mode=%s with %s", mode, config.algorithm.rollout_correction)
        self.durable = DurableRollouts(
            self.run.folder / "rollouts",
            resumed_at=start.step,
            num_ahead=1 if mode == "one_step_off" else 0,
            enabled=config.trainer.reuse_rollouts,
        )
        ctrl = config.algorithm.kl_ctrl
        self.kl_controller = make_kl_controller(
            ctrl.type, kl_coef=ctrl.kl_coef, target_kl=ctrl.target_kl, horizon=ctrl.horizon
        )
        self.stragglers = Stragglers(controller, self.run.folder, waits=mode == "sync")
        self.metrics: dict[str, float] = {}
        self.trained = start.step  # steps that the weights have been trained for
        self.state: State  # of the loop after that step
        self.validator = None
        if "val" in inputs.prompts:
            self.validator = Validator(
                controller,
                inputs.prompts["val"],
                config.data,
                config.rollout.val_kwargs,
                eos,
                num_shown=config.trainer.log_val_generations,
                folder=self.run.folder / folder if (folder := config.trainer.validation_data_dir) else None,
                with_model=derived.needs_reward_model,
            )
        validates_first = start.folder is None and config.trainer.val_before_train and self.validator is not None
        self.unlogged = {} if validates_first else start.unlogged  # the step's line until it is written

    def fit(self) -> int:
        """The job's exit code: done, or to be continued by another slice."""
        self._restore()
        code = self.run.to_its_end(self._train, self._save, lambda: self.trained)
        if code == DONE:
            self.durable.run_ended()
        self.controller["scorer"].close().get()
        self.controller["rollout"].close().get()
        return code

    def _train(self) -> dict[str, float]:
        """All steps; gives the metrics of the last validation."""
        trainer, final = self.config.trainer, {}
        if self.unlogged is not None:
            final = self._close_step(self.start.step)
        for step in range(self.start.step + 1, self.total_steps + 1):
            self.run.slice.go_on("gen" if self.experience.can_repeat else "step")
            self.metrics = {"training/global_step": float(step)}
            with self.run.profiled(step), self.timers("step"):
                self._step(step)
            self.metrics |= self.run.progress_of_save()
            self.trained, self.state, self.unlogged = step, self._state(), self._line(step)
            final = self._close_step(step) or final
            # After the log: a kill in between repeats the step, where the other order would lose its line.
            if _due(step, trainer.save_freq, self.total_steps):
                with self.timers("save_checkpoint"):
                    self._save()
            saver = self.run.saver
            self.durable.step_ended(step, saved=saver.saved_step or 0, saving=saver.step_under_way)
        return final

    def _step(self, step: int) -> None:
        """One step of PPO, as in the paper's algorithm 1."""
        timers, workers = self.timers, self.controller
        self.run.slice.is_open = self.experience.can_repeat
        batch, seen = self.experience.collect(step)
        self.metrics |= seen | {"training/epoch": float(batch.samples["epoch"][0])}
        self.metrics |= assign_to_replicas(batch, self.config, self.derived)
        updates_actor = step > self.config.trainer.critic_warmup or not self.derived.needs_critic
        is_one_update = batch.meta_info["num_prompts"] <= self.config.actor.ppo_mini_batch_size  # recorded: any number
        at_once = updates_actor and is_one_update and self.derived.old_log_prob_in_update
        batch = self._evaluate_responses(batch, old_log_prob=not at_once)
        timers.before("adv")
        with timers("adv"):
            batch.meta_info["kl_coef"] = self.kl_controller.value
            if self.derived.needs_old_log_prob and not at_once:
                batch = self._join(batch, workers["actor"].correct_rollout(batch).get())
            batch = self._join(batch, workers["actor"].compute_advantage(batch).get())
        trained = self._resampled(batch) if self.config.algorithm.use_pf_ppo else batch
        timers.before("update_critic", "update_actor", "update_weights", "dump_rollout_generations")
        self.run.slice.is_open = False  # the models change, so the step has to end
        critic = workers["critic"].update_critic(trained) if self.derived.needs_critic else None
        actor = workers["actor"].update_actor(trained) if updates_actor else None
        if critic is not None:
            with timers("update_critic"):
                self.metrics |= finish_over_steps(merge(parts) for parts in zip(*critic.get(), strict=True))
        if actor is not None:
            with timers("update_actor"):
                updated = actor.get()
                parts_of_updates = zip(*updated.meta_info.pop("metrics"), strict=True)
                self.metrics |= finish_over_steps(merge(parts) for parts in parts_of_updates)
                batch = batch.union(updated)
        if self.derived.needs_sum_pi_squared:
            found = workers["actor"].variance_proxy(batch, self.metrics.get("actor/grad_norm")).get()
            self.metrics |= finish(merge(found))
        self.experience.updated(step)
        if self.config.trainer.save_rollouts:
            with timers("dump_rollout_generations"):
                self._archive(batch, step)
        self._account(batch)

    def _evaluate_responses(self, batch: DataProto, *, old_log_prob: bool) -> DataProto:
        """What the models think of the responses: log-probs under policy, reference and teacher, and values.

        All are under way before the first is waited for: roles on ranks of their own run at the same time. Without
        `old_log_prob` the log-probs under the policy come from its update.
        """
        workers, derived = self.controller, self.derived
        self.timers.before("old_log_prob", "ref", "teacher", "values")
        calls: dict[str, Future[DataProto]] = {}
        if old_log_prob:
            actor = workers["actor"]
            recomputes = derived.needs_old_log_prob
            calls["old_log_prob"] = (actor.compute_log_prob if recomputes else actor.adopt_rollout_log_probs)(batch)
        if derived.needs_ref:
            calls["ref"] = workers["actor" if derived.ref_in_actor else "ref"].compute_ref_log_prob(batch)
        if derived.needs_teacher:
            topk = self.config.distillation.distillation_loss.loss_mode == "forward_kl_topk"
            teacher = workers["teacher"]
            calls["teacher"] = (teacher.compute_teacher_topk if topk else teacher.compute_teacher_log_prob)(batch)
        if derived.needs_critic:
            calls["values"] = workers["critic"].compute_values(batch)
        for phase, call in calls.items():
            with self.timers(phase):
                batch = self._join(batch, call.get())
        return batch

    def _resampled(self, batch: DataProto) -> DataProto:
        """PF-PPO: as many rows, drawn with replacement by their scores."""
        pf_ppo, step = self.config.algorithm.pf_ppo, batch.meta_info["step"]
        key = np.random.SeedSequence(self.config.run.seed % 2**64, spawn_key=(PF_PPO_STREAM, step))
        uniforms = (np.random.Philox(key).random_raw(len(batch)) >> np.uint64(11)) * 2.0**-53
        return batch[pf_ppo_rows(batch.samples["score"], uniforms, pf_ppo.reweight_method, pf_ppo.weight_pow)]

    def _archive(self, batch: DataProto, step: int) -> None:
        folder, version = self.run.folder / "rollouts", int(batch.samples["weight_version_max"].max())
        try:
            write_samples(self.controller, batch, folder, step, seed=self.config.run.seed, weight_version=version)
        except OSError as error:
            log.warning("the rollouts of step %d are not archived: %s", step, error)

    def _close_step(self, step: int) -> dict[str, float]:
        """Validation where it is due, and the step's line; gives what validation found."""
        found: dict[str, float] = {}
        assert self.unlogged is not None
        if self.validator is not None and (step == 0 or _due(step, self.config.trainer.test_freq, self.total_steps)):
            self.run.slice.go_on("testing")
            with self.timers("testing"), self.experience.paused(step):
                found, shown = self.validator.run(step)
            if shown:
                self.run.writer.text("validation/samples", step, shown)
            core = {name: value for name, value in found.items() if re.fullmatch("val-core/.*/mean@[0-9]+", name)}
            log.info("step %d: %s", step, ", ".join(f"{name} {value:.3f}" for name, value in core.items()))
        self.run.writer.log(step, self.unlogged | found | self.timers.collect())
        self.controller.traffic.collect()  # of validation: a step's traffic is that of training
        self.unlogged = None
        self.metrics |= found
        if step > 0:
            glance = {name: self.metrics[key] for name, key in GLANCE.items() if key in self.metrics}
            self.run.progress.update(step, glance)
        return found

    def _restore(self) -> None:
        """Weights, optimizers and counters as the start says, and the weights in the rollout engine."""
        workers, start = self.controller, self.start
        for role in [role for role in ("actor", "critic", "ref") if role in self.derived.roles]:
            if start.folder is not None and role != "ref":
                workers[role].load(str(start.folder)).get()
            elif start.init_from is not None:
                workers[role].load(str(start.init_from), role="actor", weights_only=True).get()
        if "teacher" in start.frozen:
            workers["teacher"].load(str(start.frozen["teacher"]), role="actor", weights_only=True).get()
        if "reward" in start.frozen:
            workers["reward"].load_model(str(start.frozen["reward"])).get()
        if start.folder is not None:
            self.kl_controller.load_state_dict(start.state["kl_ctrl"])
            self.experience.load(start.state, start.folder, start.step)
            log.info("resuming after step %d from %s", start.step, start.folder)
        discard_from(self.run.folder / "rollouts", start.step + 1)
        recalled = self.durable.resume()
        if self.config.trainer.reuse_rollouts:
            workers["rollout"].keep_responses(origin_of(start.init_from), recalled).get()
        self.weights.bring(start.step)
        self.state = self._state()
        self.timers.collect()  # of the start, which is no step's

    def _state(self) -> State:
        """The loop between two steps, as a checkpoint holds it."""
        loop = {
            "epoch": self.metrics.get("training/epoch", self.start.state.get("epoch", 0.0)),
            "kl_ctrl": self.kl_controller.state_dict(),
            "init_from": str(self.start.init_from) if self.start.init_from else None,
            "frozen": {role: str(folder) for role, folder in self.start.frozen.items()},
        }
        return State(loop, self.experience.between_steps(), self.metrics)

    def _save(self) -> None:
        """A checkpoint of the last step trained, whether it is logged or not."""
        step, state = self.trained, self.state
        roles = ("actor", "critic") if self.derived.needs_critic else ("actor",)
        line = None if self.unlogged is None else {"unlogged": without_nan(self.unlogged)}
        self.run.save(
            step,
            roles,
            state.loop | (line or {}),
            state.metrics,
            files=lambda folder: self.experience.save(folder, step, state.experience),
        )

    def _join(self, batch: DataProto, part: DataProto) -> DataProto:
        """Add a call's columns to the batch, and its metrics to the step's."""
        self.metrics |= finish(merge(part.meta_info.pop("metrics", [])))
        if "actor/reward_kl_penalty" in self.metrics and "advantages" in part.tokens:
            self.kl_controller.update(self.metrics["actor/reward_kl_penalty"], len(batch))
        return batch.union(part)

    def _account(self, batch: DataProto) -> None:
        """Sizes and speeds that need the batch."""
        samples = batch.samples
        self.lengths = (samples["prompt_length"] + samples["response_length"]).tolist()
        self.num_response_tokens, self.num_tokens = int(samples["response_length"].sum()), sum(self.lengths)
        self.metrics["perf/total_num_tokens"] = float(self.num_tokens)

    def _line(self, step: int) -> dict[str, float]:
        """The step's metrics, times and sizes."""
        self.metrics |= self.controller.traffic.collect() | self.stragglers.observe(step)
        found = self.timers.collect()
        seconds = found["timing_s/step"]
        for phase in ("gen", "ref", "teacher", "values", "adv", "update_critic", "update_actor"):
            if f"timing_s/{phase}" in found:
                tokens = self.num_response_tokens if phase == "gen" else self.num_tokens
                found[f"timing_per_token_ms/{phase}"] = 1e3 * found[f"timing_s/{phase}"] / max(tokens, 1)
        found["perf/time_per_step"] = seconds
        found["perf/throughput"] = self.num_tokens / seconds / self.derived.world_size
        if self.peak_flops is not None:
            found |= mfu_metrics(
                *(self.config, self.derived, self.inputs.shape, self.lengths, self.num_response_tokens),
                *(found, self.peak_flops),
            )
        found["perf/cpu_memory_used_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        if self.config.async_training.mode != "sync":
            busy = self.metrics.get("perf/rollout_busy_s", 0.0)  # missing where the surplus alone made the step
            num_replicas = self.derived.roles["rollout"].dp
            found |= idle_metrics(found.get("timing_s/gen", 0.0), busy, seconds, num_replicas)
        return self.metrics | self.weights.metrics | found


def frozen_weights(config: Config, derived: Derived) -> dict[str, str]:
    """Where the weights of the models come from that this job only asks."""
    found = {}
    if derived.needs_teacher:
        own = config.teacher.model.path if config.teacher.model else None
        found["teacher"] = config.teacher.init_from or own or config.model.init_from or config.model.path
    if derived.needs_reward_model:
        found["reward"] = config.reward.reward_model.init_from
    return {role: path for role, path in found.items() if path is not None}


def check_recording(config: Config) -> None:
    """A run cannot replay itself: it writes over what it would read."""
    recorded = config.trainer.rollouts_from
    if recorded is None:
        return
    if not Path(recorded).is_dir():
        raise InputError(f"trainer.rollouts_from={recorded}: no such folder; name the rollouts/ folder of a run")
    if Path(recorded).resolve().is_relative_to(run_directory(config).resolve()):
        raise InputError(f"trainer.rollouts_from={recorded} is this run's own folder; choose another run.name")


def _due(step: int, frequency: int, last: int) -> bool:
    return frequency > 0 and (step % frequency == 0 or step == last)
