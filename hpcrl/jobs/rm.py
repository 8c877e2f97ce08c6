"""reward model, from preferences"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from hpcrl.config.derive import RoleLayouts
from hpcrl.config.roles import REWARD, RoleSpec
from hpcrl.config.schema import Config, OptimConfig
from hpcrl.config.yaml_core import ConfigError
from hpcrl.run.job_parts import Report
from hpcrl.run.pairs import PairsConfig, PairsJob

if TYPE_CHECKING:
    from hpcrl.run.run import Run
    from hpcrl.workers.team import Inputs


class RmConfig(PairsConfig):
    """`hpcrl rm`: a Bradley-Terry reward model from pairs of answers in data.train_files."""

    optim: OptimConfig = Field(default_factory=lambda: OptimConfig(lr=1e-5), description="optimizer")


class RmReport(Report):
    shown = {name: f"train/{name}" for name in ("loss", "accuracy", "margin")} | {"val_accuracy": "val/accuracy"}


class RewardModel(PairsJob):
    """Bradley-Terry on pairs of answers."""

    name = "rm"
    section = RmConfig
    report_class = RmReport
    trained_role = "reward"
    side_note = ", whose last token has the score"
    memory_advice = (
        "a smaller rm.max_token_len_per_gpu, model.recompute.granularity=full, a larger placement.reward.tp or pp"
    )

    def loop(self, run: Run) -> None:
        data, reward = run.roles("data", "reward")
        for step in run.steps():  # between two steps: wait, log, evaluate, save, stop if asked to
            batch = data.load(self.next_pairs(run, step))  # chosen and rejected, next to each other
            reward.update(batch)

    @classmethod
    def check(cls, config: Config, num_ranks: int) -> RoleLayouts:
        """It trains on the reward model's ranks."""
        if config.model.lora_rank > 0:
            raise ConfigError(
                f"model.lora_rank={config.model.lora_rank} is for the policy, and `hpcrl rm` trains a whole model; "
                "use model.lora_rank=0"
            )
        return cls.check_pairs(config, [REWARD], num_ranks)

    def read_inputs(self) -> Inputs:
        from hpcrl.workers.team import reward_shape

        inputs = super().read_inputs()
        inputs.shape = reward_shape(self.config, inputs.shape)
        return inputs

    def roles(self) -> list[RoleSpec]:
        model = replace(REWARD, worker="hpcrl.workers.supervised:PreferenceWorker", trains=True)
        return [model, RoleSpec("data", "hpcrl.workers.supervised:PreferenceDataWorker", on=("reward",))]


JOB = RewardModel
