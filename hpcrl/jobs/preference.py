"""policy, from preferences: DPO and its relatives"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field, PositiveInt

from hpcrl.algorithms.preference_losses import PREFERENCE_LOSSES, PreferenceParameters
from hpcrl.batch.balance import balanced_assignment
from hpcrl.batch.data_proto import DataProto
from hpcrl.config.derive import RoleLayouts
from hpcrl.config.placement import place
from hpcrl.config.roles import ACTOR, EXPORT, REF, RoleSpec
from hpcrl.config.schema import Config, OptimConfig, PositiveOrMinusOne, Section
from hpcrl.config.yaml_core import ConfigError
from hpcrl.controller.controller import replica_column
from hpcrl.data.answers import CHOSEN, REJECTED, PreferenceDataset
from hpcrl.run.calls import metrics_of
from hpcrl.run.job import SupervisedJob

if TYPE_CHECKING:
    from hpcrl.run.run import Run
    from hpcrl.workers.team import Inputs

log = logging.getLogger(__name__)


class PreferenceConfig(Section, PreferenceParameters):
    """`hpcrl preference`: DPO and its relatives, on pairs of answers in data.train_files."""

    loss_type: str = Field("sigmoid", description="name of a registered preference loss; sigmoid is DPO")
    chosen_key: str = Field("chosen", description="column that holds the better answer")
    rejected_key: str = Field("rejected", description="column that holds the worse answer")
    batch_size: PositiveInt = Field(64, description="pairs per optimizer step, over all ranks")
    max_token_len_per_gpu: PositiveInt = Field(16384, description="tokens per micro-batch of one model replica")
    total_training_steps: PositiveInt = Field(200, description="optimizer steps")
    optim: OptimConfig = Field(default_factory=lambda: OptimConfig(lr=1e-6), description="optimizer")
    eval_freq: PositiveOrMinusOne = Field(-1, description="evaluate on data.val_files every N steps; -1: never")
    eval_samples: PositiveInt = Field(256, description="validation pairs per evaluation")


class Preference(SupervisedJob):
    """The policy learns which answer of a pair is better."""

    name = label = "preference"
    section = PreferenceConfig
    memory_advice = (
        "a smaller preference.max_token_len_per_gpu, model.recompute.granularity=full, a larger placement.actor.tp"
    )

    def loop(self, run: Run) -> None:
        data, ref, actor = run.roles("data", "ref", "actor")
        for step in run.steps():  # between two steps: wait, log, evaluate, save, stop if asked to
            rows = self.next_rows(run, step, self.pair_lengths["train"])
            batch = data.load(self.pairs("train", rows))  # chosen and rejected, next to each other
            if self.needs_reference:
                batch = batch | ref.compute_ref_log_prob(batch)
            actor.update(batch)

    def pairs(self, split: str, rows: np.ndarray) -> DataProto:
        """Chosen and rejected of each pair on one replica of each role, with tokens balanced over replicas."""
        samples = {"row": np.repeat(rows, 2), "side": np.tile(np.array([CHOSEN, REJECTED]), len(rows))}
        for dp in {role.dp for role in self.derived.roles.values()}:
            assignment = balanced_assignment(self.pair_lengths[split][rows], dp)
            samples[replica_column(dp)] = np.repeat(assignment, 2)
        return DataProto({}, samples, {"split": split})

    @classmethod
    def check(cls, config: Config, num_ranks: int) -> RoleLayouts:
        """It trains on the actor's ranks; a reference that is not the policy without its adapters has its own."""
        own = config.section("preference")
        loss = PREFERENCE_LOSSES.get(own.loss_type)
        with_ref = loss.reference and config.model.lora_rank == 0
        roles = place(config, [ACTOR, REF] if with_ref else [ACTOR], num_ranks)
        longest = cls.check_data(config, "chosen and rejected")
        if own.max_token_len_per_gpu < 2 * longest:
            raise ConfigError(
                f"preference.max_token_len_per_gpu={own.max_token_len_per_gpu} holds no pair of the longest sequences, "
                f"2 * (data.max_prompt_length + data.max_response_length) = {2 * longest}; use {2 * longest} or more"
            )
        if own.loss_type == "exo_pair" and own.label_smoothing == 0:
            raise ConfigError("preference.loss_type=exo_pair needs preference.label_smoothing above 0, such as 0.001")
        rows = [("longest sequence", longest, "tokens"), ("step", 2 * own.batch_size, "samples")]
        return RoleLayouts(num_ranks, roles, rows)

    def read_inputs(self) -> Inputs:
        from hpcrl.workers.team import Inputs, data_config, read_model

        tokenizer, shape = read_model(self.config)
        data, own, pairs = data_config(self.config), self.own, {}
        files = {"train": (data.train_files, data.train_max_samples), "val": (data.val_files, data.val_max_samples)}
        for split, (paths, max_samples) in files.items():
            if split == "train" or own.eval_freq > 0:
                keys = {"chosen_key": own.chosen_key, "rejected_key": own.rejected_key}
                pairs[split] = PreferenceDataset(
                    paths, tokenizer, data, **keys, max_samples=max_samples, world=self.world
                )
        return Inputs(shape, tokenizer, pairs=pairs)

    @property
    def needs_reference(self) -> bool:
        return PREFERENCE_LOSSES.get(self.own.loss_type).reference

    def roles(self) -> list[RoleSpec]:
        actor = replace(ACTOR, worker="hpcrl.workers.preference:PreferenceActorWorker")
        ref = replace(REF, worker="hpcrl.workers.preference:PreferenceRefWorker")
        data = RoleSpec("data", "hpcrl.workers.supervised:PreferenceDataWorker", on=("actor",))
        export = [EXPORT] if self.config.trainer.save_hf or self.config.model.lora_rank > 0 else []
        return [actor, *([ref] if "ref" in self.derived.roles else []), data, *export]

    def stands_for(self, role: str) -> str:
        return "actor" if role == "ref" and "ref" not in self.derived.roles else role

    @property
    def loaded_roles(self) -> tuple[str, ...]:
        return (*self.saved_roles, "ref") if "ref" in self.derived.roles else self.saved_roles

    @property
    def needs_start_weights(self) -> bool:
        return "ref" in self.derived.roles

    def set_up(self, run: Run) -> None:
        self.pair_lengths = {}  # tokens of chosen and rejected together, int64 (number of pairs,)
        for split, dataset in self.inputs.pairs.items():
            self.pair_lengths[split] = dataset.lengths(CHOSEN) + dataset.lengths(REJECTED)
            equal = f"; in {dataset.num_equal} of them both answers are the same" if dataset.num_equal else ""
            log.info("%s: %d pairs, %d too long%s", split, len(dataset), dataset.prompts.num_filtered, equal)

    def validate(self, run: Run, step: int) -> tuple[dict[str, float], str]:
        """Loss, rewards and accuracy over the first validation pairs."""
        rows = np.arange(min(self.own.eval_samples, len(self.inputs.pairs["val"])), dtype=np.int64)
        batch = self.pairs("val", rows)
        batch = batch.union(run.controller["data"].load(batch).get())
        if self.needs_reference:
            batch = batch.union(run.controller[self.stands_for("ref")].compute_ref_log_prob(batch).get())
        return metrics_of(run.controller["actor"].evaluate(batch).get()), ""

    def progress(self, metrics: dict[str, float]) -> dict[str, float]:
        shown = {"loss": metrics["train/loss"], "accuracy": metrics["rewards/accuracies"]}
        return shown | {name: metrics[f"val/{name}"] for name in ("loss",) if f"val/{name}" in metrics}

    def state(self, step: int) -> dict[str, int]:
        return {"consumed_pairs": step * self.own.batch_size}


JOB = Preference
