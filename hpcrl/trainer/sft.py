"""The supervised warm start: cross-entropy on answers, on the engine and layouts of the actor."""

from __future__ import annotations

import logging

import numpy as np

from hpcrl.algorithms.metrics import finish, merge
from hpcrl.batch.balance import balanced_assignment
from hpcrl.batch.data_proto import DataProto
from hpcrl.config.derive import DerivedSft
from hpcrl.config.schema import Config, ValKwargs
from hpcrl.controller.controller import Controller, replica_column, run_program
from hpcrl.data.order import batch_rows
from hpcrl.roles.team import Inputs, build_sft_team, read_inputs
from hpcrl.runtime.exits import DONE
from hpcrl.runtime.world import World
from hpcrl.trainer.run import Run, Start, find_start, start_slice
from hpcrl.trainer.stragglers import Stragglers
from hpcrl.trainer.validation import Validator

log = logging.getLogger(__name__)


def run(world: World, config: Config, derived: DerivedSft) -> int:
    """`hpcrl sft` on every rank."""
    inputs = world.run_collectively(lambda: read_inputs(config, world, sft=True))
    start = find_start(world, config, job="sft")
    start_slice(world, config, start, 0 if start.state.get("reached") else config.sft.total_training_steps)
    team = build_sft_team(world, config, derived, inputs)
    code = run_program(
        world,
        team.workers,
        team.kinds,
        team.layouts,
        lambda controller: SFTTrainer(world, controller, config, derived, inputs, start).fit(),
    )
    return DONE if code is None else code  # rank 0 knows


class SFTTrainer:
    """The controller's program, on rank 0."""

    def __init__(
        self,
        world: World,
        controller: Controller,
        config: Config,
        derived: DerivedSft,
        inputs: Inputs,
        start: Start,
    ) -> None:
        self.controller = controller
        self.config = config
        self.start = start
        assert inputs.answers is not None
        self.answers = inputs.answers
        self.dp = derived.roles["actor"].dp
        self.run = Run(world, controller, config, "sft", "sft", start, config.sft.total_training_steps)
        self.stragglers = Stragglers(controller, self.run.folder, waits=True)
        self.step, self.reached = start.step, bool(start.state.get("reached"))
        self.metrics: dict[str, float] = {}
        self.validator = None
        if config.sft.eval_freq > 0:
            self.validator = Validator(
                controller,
                inputs.prompts["val"],
                config.data,
                [ValKwargs(n=1, temperature=1.0)],
                (int(inputs.tokenizer.eos_token_id),),
                num_prompts=config.sft.eval_samples,
            )

    def fit(self) -> int:
        """The job's exit code: done, or to be continued by another slice."""
        if self.start.folder is not None:
            self.controller["actor"].load(str(self.start.folder)).get()
            log.info("resuming after step %d from %s", self.start.step, self.start.folder)
        elif self.start.init_from is not None:
            self.controller["actor"].load(str(self.start.init_from), weights_only=True).get()
        code = self.run.to_its_end(self._train, self._save, lambda: self.step)
        if self.validator is not None:
            self.controller["scorer"].close().get()
            self.controller["rollout"].close().get()
        return code

    def _train(self) -> dict[str, float]:
        """All steps; gives the last accuracies."""
        sft, timers, save_freq = self.config.sft, self.run.timers, self.config.trainer.save_freq
        total = sft.total_training_steps
        final: dict[str, float] = {}
        while self.step < total and not self.reached:
            self.run.slice.go_on("step")
            step = self.step = self.step + 1
            with self.run.profiled(step), timers("step"):
                self._step(step)
                if self.validator is not None and (step % sft.eval_freq == 0 or step == total):
                    final = self._evaluate(step)
                    score = float(np.mean(list(final.values())))
                    self.reached = sft.stop_at_score is not None and score >= sft.stop_at_score
            self.metrics |= self.run.progress_of_save()
            self.metrics |= self.controller.traffic.collect() | self.stragglers.observe(step)
            self.run.writer.log(step, self.metrics | timers.collect())
            shown = {"loss": self.metrics["train/loss"]} | {name.split("/")[-1]: value for name, value in final.items()}
            self.run.progress.update(step, shown)
            if step == total or self.reached or (save_freq > 0 and step % save_freq == 0):
                with timers("save_checkpoint"):
                    self._save()
        if self.reached:
            log.info("stopped at step %d: accuracy reached sft.stop_at_score=%g", self.step, sft.stop_at_score)
        return final

    def _save(self) -> None:
        state = {"consumed_rows": self.step * self.config.sft.batch_size, "reached": self.reached}
        self.run.save(self.step, ("actor",), state, self.metrics)

    def _step(self, step: int) -> None:
        config = self.config
        rows, epochs = batch_rows(len(self.answers), config.sft.batch_size, step, config.run.seed, config.data.shuffle)
        lengths = self.answers.lengths[rows]
        samples = {"row": rows, replica_column(self.dp): balanced_assignment(lengths, self.dp)}
        batch = DataProto({}, samples, {"step": step})
        batch = batch.union(self.controller["data"].load(batch).get())
        parts = self.controller["actor"].update(batch).get()
        self.metrics = {"training/global_step": float(step), "training/epoch": float(epochs[0])} | finish(merge(parts))
        self.metrics["perf/total_num_tokens"] = float(np.sum(lengths))

    def _evaluate(self, step: int) -> dict[str, float]:
        """Accuracy at temperature 1 on some validation prompts, by metric name."""
        assert self.validator is not None
        with self.run.timers("testing"):
            self.controller["refit"].update_weights().get()
            metrics, _ = self.validator.run(step)
        self.metrics |= metrics
        return {name: value for name, value in metrics.items() if name.startswith("val-core/")}
