"""reward model, from preferences"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field, PositiveInt

from hpcrl.batch.balance import balanced_assignment
from hpcrl.batch.data_proto import DataProto
from hpcrl.config.derive import RoleLayouts
from hpcrl.config.placement import place
from hpcrl.config.roles import REWARD, RoleSpec
from hpcrl.config.schema import Config, OptimConfig, PositiveOrMinusOne, Section
from hpcrl.config.yaml_core import ConfigError
from hpcrl.controller.controller import replica_column
from hpcrl.data.answers import CHOSEN, REJECTED, AnswerDataset
from hpcrl.run.calls import metrics_of
from hpcrl.run.job import SupervisedJob

if TYPE_CHECKING:
    from hpcrl.run.run import Run
    from hpcrl.workers.team import Inputs

log = logging.getLogger(__name__)


class RmConfig(Section):
    """`hpcrl rm`: a Bradley-Terry reward model from pairs of answers in data.train_files."""

    chosen_key: str = Field("chosen", description="column that holds the better answer")
    rejected_key: str = Field("rejected", description="column that holds the worse answer")
    batch_size: PositiveInt = Field(256, description="pairs per optimizer step, over all ranks")
    max_token_len_per_gpu: PositiveInt = Field(16384, description="tokens per micro-batch of one model replica")
    total_training_steps: PositiveInt = Field(200, description="optimizer steps")
    optim: OptimConfig = Field(default_factory=lambda: OptimConfig(lr=1e-5), description="optimizer")
    eval_freq: PositiveOrMinusOne = Field(-1, description="evaluate on data.val_files every N steps; -1: never")
    eval_samples: PositiveInt = Field(256, description="validation pairs per evaluation")


class RewardModel(SupervisedJob):
    """Bradley-Terry on pairs of answers."""

    name = label = "rm"
    section = RmConfig
    trained_role = "reward"
    memory_advice = (
        "a smaller rm.max_token_len_per_gpu, model.recompute.granularity=full, a larger placement.reward.tp or pp"
    )

    def loop(self, run: Run) -> None:
        data, reward = run.roles("data", "reward")
        for step in run.steps():  # between two steps: wait, log, evaluate, save, stop if asked to
            rows = self.next_rows(run, step, self.pair_lengths["train"])
            batch = data.load(self.pairs("train", rows))  # chosen and rejected, next to each other
            reward.update(batch)

    def pairs(self, split: str, rows: np.ndarray) -> DataProto:
        """Chosen and rejected of each pair on one replica, with tokens balanced over replicas."""
        dp = self.derived.roles["reward"].dp
        samples = {
            "row": np.repeat(rows, 2),
            "side": np.tile(np.array([CHOSEN, REJECTED]), len(rows)),
            replica_column(dp): np.repeat(balanced_assignment(self.pair_lengths[split][rows], dp), 2),
        }
        return DataProto({}, samples, {"split": split})

    @classmethod
    def check(cls, config: Config, num_ranks: int) -> RoleLayouts:
        """It trains on the reward model's ranks."""
        rm = config.section("rm")
        if config.model.lora_rank > 0:
            raise ConfigError(
                f"model.lora_rank={config.model.lora_rank} is for the policy, and `hpcrl rm` trains a whole model; "
                "use model.lora_rank=0"
            )
        roles = place(config, [REWARD], num_ranks)
        longest = cls.check_data(config, "chosen and rejected")
        if rm.max_token_len_per_gpu < 2 * longest:
            raise ConfigError(
                f"rm.max_token_len_per_gpu={rm.max_token_len_per_gpu} holds no pair of the longest sequences, "
                f"2 * (data.max_prompt_length + data.max_response_length) = {2 * longest}; use {2 * longest} or more"
            )
        rows = [("longest sequence", longest, "tokens"), ("step", 2 * rm.batch_size, "samples")]
        return RoleLayouts(num_ranks, roles, rows)

    def read_inputs(self) -> Inputs:
        from hpcrl.model.hf.directory import shape_of
        from hpcrl.workers.team import Inputs, read_model

        tokenizer, shape = read_model(self.config)
        shape = shape_of(REWARD.architecture(self.config), shape.vocab_size)
        data, rm, pairs = self.config.data, self.config.section("rm"), {}
        files = {"train": (data.train_files, data.train_max_samples), "val": (data.val_files, data.val_max_samples)}
        columns = {"rm.chosen_key": rm.chosen_key, "rm.rejected_key": rm.rejected_key}
        for split, (paths, max_samples) in files.items():
            if split == "train" or rm.eval_freq > 0:
                pairs[split] = AnswerDataset(paths, tokenizer, data, columns, max_samples, self.world)
        return Inputs(shape, tokenizer, pairs=pairs)

    def roles(self) -> list[RoleSpec]:
        model = replace(REWARD, worker="hpcrl.workers.supervised:PreferenceWorker", trains=True)
        return [model, RoleSpec("data", "hpcrl.workers.supervised:PreferenceDataWorker", on=("reward",))]

    def set_up(self, run: Run) -> None:
        self.pair_lengths = {}  # tokens of chosen and rejected together, int64 (number of pairs,)
        for split, dataset in self.inputs.pairs.items():
            self.pair_lengths[split] = dataset.lengths(CHOSEN) + dataset.lengths(REJECTED)
            equal = f"; in {dataset.num_equal} of them both answers are the same" if dataset.num_equal else ""
            log.info("%s: %d pairs, %d too long%s", split, len(dataset), dataset.prompts.num_filtered, equal)

    def validate(self, run: Run, step: int) -> tuple[dict[str, float], str]:
        """Loss, accuracy and margins over the first validation pairs."""
        rows = np.arange(min(self.own.eval_samples, len(self.inputs.pairs["val"])), dtype=np.int64)
        batch = self.pairs("val", rows)
        batch = batch.union(run.controller["data"].load(batch).get())
        return metrics_of(run.controller["reward"].evaluate(batch).get()), ""

    def progress(self, metrics: dict[str, float]) -> dict[str, float]:
        shown = {name: metrics[f"train/{name}"] for name in ("loss", "accuracy", "margin")}
        return shown | ({"val_accuracy": metrics["val/accuracy"]} if "val/accuracy" in metrics else {})

    def state(self, step: int) -> dict[str, int]:
        return {"consumed_pairs": step * self.own.batch_size}


JOB = RewardModel
