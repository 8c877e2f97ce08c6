"""The reward model's training: Bradley-Terry on pairs of answers, on the engine and layouts of every other role."""

from __future__ import annotations

import logging

import numpy as np

from hpcrl.algorithms.metrics import finish, merge
from hpcrl.batch.balance import balanced_assignment
from hpcrl.batch.data_proto import DataProto
from hpcrl.config.derive import DerivedRm
from hpcrl.config.schema import Config
from hpcrl.controller.controller import Controller, replica_column, run_program
from hpcrl.data.order import batch_rows
from hpcrl.data.preference import CHOSEN, REJECTED, PreferenceDataset
from hpcrl.roles.team import build_rm_team, read_rm_inputs
from hpcrl.runtime.exits import DONE
from hpcrl.runtime.world import World
from hpcrl.trainer.run import Run, Start, find_start, start_slice
from hpcrl.trainer.stragglers import Stragglers

log = logging.getLogger(__name__)


def run(world: World, config: Config, derived: DerivedRm) -> int:
    """`hpcrl rm` on every rank."""
    inputs = world.run_collectively(lambda: read_rm_inputs(config, world))
    start = find_start(world, config, trained="reward", job="rm")
    start_slice(world, config, start, config.rm.total_training_steps)
    team = build_rm_team(world, config, derived, inputs)
    code = run_program(
        world,
        team.workers,
        team.kinds,
        team.layouts,
        lambda controller: RewardModelTrainer(world, controller, config, derived, inputs.pairs, start).fit(),
    )
    return DONE if code is None else code  # rank 0 knows


class RewardModelTrainer:
    """The controller's program, on rank 0."""

    def __init__(
        self,
        world: World,
        controller: Controller,
        config: Config,
        derived: DerivedRm,
        pairs: dict[str, PreferenceDataset],
        start: Start,
    ) -> None:
        self.controller = controller
        self.config = config
        self.pairs = pairs
        self.start = start
        self.dp = derived.roles["reward"].dp
        self.run = Run(world, controller, config, "rm", "rm", start, config.rm.total_training_steps)
        self.stragglers = Stragglers(controller, self.run.folder, waits=True)
        self.step = start.step
        self.metrics: dict[str, float] = {}
        for split, dataset in pairs.items():
            equal = f"; in {dataset.num_equal} of them both answers are the same" if dataset.num_equal else ""
            log.info("%s: %d pairs, %d too long%s", split, len(dataset), dataset.prompts.num_filtered, equal)

    def fit(self) -> int:
        """The job's exit code: done, or to be continued by another slice."""
        self._restore()
        return self.run.to_its_end(self._train, self._save, lambda: self.step)

    def _train(self) -> dict[str, float]:
        """All steps; gives the metrics of the last evaluation."""
        rm, timers, save_freq = self.config.rm, self.run.timers, self.config.trainer.save_freq
        total = rm.total_training_steps
        final: dict[str, float] = {}
        for step in range(self.start.step + 1, total + 1):
            self.run.slice.go_on("step")
            with self.run.profiled(step), timers("step"):
                self._step(step)
                if rm.eval_freq > 0 and (step % rm.eval_freq == 0 or step == total):
                    final = self._evaluate()
                    self.metrics |= final
            self.step = step
            self.metrics |= self.run.progress_of_save()
            self.metrics |= self.controller.traffic.collect() | self.stragglers.observe(step)
            self.run.writer.log(step, self.metrics | timers.collect())
            shown = {name: self.metrics[f"train/{name}"] for name in ("loss", "accuracy", "margin")}
            shown |= {"val_accuracy": final["val/accuracy"]} if final else {}
            self.run.progress.update(step, shown)
            # After the log: a kill in between repeats the step, where the other order would lose its line.
            if step == total or (save_freq > 0 and step % save_freq == 0):
                with timers("save_checkpoint"):
                    self._save()
        return final

    def _save(self) -> None:
        state = {"consumed_pairs": self.step * self.config.rm.batch_size}
        self.run.save(self.step, ("reward",), state, self.metrics)

    def _restore(self) -> None:
        """The weights that the start names; an actor's lack the head, which then starts anew."""
        reward = self.controller["reward"]
        if self.start.folder is not None:
            reward.load(str(self.start.folder)).get()
            log.info("resuming after step %d from %s", self.start.step, self.start.folder)
        elif self.start.init_from is not None:
            reward.load(str(self.start.init_from), role="actor", weights_only=True).get()

    def _step(self, step: int) -> None:
        config, size = self.config, len(self.pairs["train"])
        rows, epochs = batch_rows(size, config.rm.batch_size, step, config.run.seed, config.data.shuffle)
        batch = self._batch("train", rows)
        parts = self.controller["reward"].update(batch).get()
        self.metrics = {"training/global_step": float(step), "training/epoch": float(epochs[0])} | finish(merge(parts))
        self.metrics["perf/total_num_tokens"] = float(self._tokens("train", rows).sum())

    def _evaluate(self) -> dict[str, float]:
        """Loss, accuracy and margins over the first validation pairs."""
        with self.run.timers("testing"):
            rows = np.arange(min(self.config.rm.eval_samples, len(self.pairs["val"])), dtype=np.int64)
            return finish(merge(self.controller["reward"].evaluate(self._batch("val", rows)).get()))

    def _batch(self, split: str, rows: np.ndarray) -> DataProto:
        """Chosen and rejected of each pair next to each other, on one replica, with tokens balanced over replicas."""
        samples = {
            "row": np.repeat(rows, 2),
            "side": np.tile(np.array([CHOSEN, REJECTED]), len(rows)),
            replica_column(self.dp): np.repeat(balanced_assignment(self._tokens(split, rows), self.dp), 2),
        }
        batch = DataProto({}, samples, {"split": split})
        return batch.union(self.controller["data"].load(batch).get())

    def _tokens(self, split: str, rows: np.ndarray) -> np.ndarray:
        """Tokens of each pair, int64 (len(rows),)."""
        pairs = self.pairs[split]
        return pairs.lengths(CHOSEN)[rows] + pairs.lengths(REJECTED)[rows]
