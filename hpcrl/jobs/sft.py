"""supervised warm start"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field, PositiveInt

from hpcrl.batch.balance import balanced_assignment
from hpcrl.batch.data_proto import DataProto
from hpcrl.config.derive import RoleLayouts, check_budget
from hpcrl.config.placement import place
from hpcrl.config.plugins import check_algorithms
from hpcrl.config.roles import ACTOR, REFIT, ROLLOUT, SCORER, RoleSpec
from hpcrl.config.schema import Config, OptimConfig, PositiveOrMinusOne, Section, ValKwargs
from hpcrl.config.yaml_core import ConfigError
from hpcrl.controller.controller import replica_column
from hpcrl.data.answers import AnswerDataset
from hpcrl.run.job import SupervisedJob
from hpcrl.run.validation import Validator

if TYPE_CHECKING:
    from hpcrl.run.run import Run
    from hpcrl.workers.team import Inputs


class SftConfig(Section):
    """`hpcrl sft`: supervised warm start on data.train_files, loss on the answer only."""

    answer_key: str = Field("answer", description="column that holds the answer text")
    batch_size: PositiveInt = Field(256, description="sequences per optimizer step, over all ranks")
    max_token_len_per_gpu: PositiveInt = Field(16384, description="tokens per micro-batch of one model replica")
    total_training_steps: PositiveInt = Field(200, description="optimizer steps at most")
    optim: OptimConfig = Field(default_factory=lambda: OptimConfig(lr=2e-3), description="optimizer")
    eval_freq: PositiveOrMinusOne = Field(-1, description="sample validation prompts every N steps; -1: never")
    eval_samples: PositiveInt = Field(256, description="validation prompts per evaluation")
    stop_at_score: float | None = Field(
        None, description="stop once validation accuracy at temperature 1 reaches this; null: run all steps"
    )


class Sft(SupervisedJob):
    """Cross-entropy on the answers, with the engine and the layouts of the actor."""

    name = label = "sft"
    section = SftConfig
    memory_advice = (
        "a smaller sft.max_token_len_per_gpu, model.recompute.granularity=full, a larger placement.actor.tp or pp"
    )

    def loop(self, run: Run) -> None:
        data, actor = run.roles("data", "actor")
        for step in run.steps():  # between two steps: wait, log, evaluate, save, stop if asked to
            rows = self.next_rows(run, step, self.inputs.answers.lengths())
            batch = data.load(self.balanced(rows, step))  # sequences of prompt and answer
            actor.update(batch)

    def balanced(self, rows: np.ndarray, step: int) -> DataProto:
        """The rows as a batch, with balanced tokens on the replicas."""
        lengths, dp = self.inputs.answers.lengths()[rows], self.derived.roles["actor"].dp
        return DataProto({}, {"row": rows, replica_column(dp): balanced_assignment(lengths, dp)}, {"step": step})

    @classmethod
    def check(cls, config: Config, num_ranks: int) -> RoleLayouts:
        """It trains on the actor's ranks, and samples on the rollout's."""
        sft = config.section("sft")
        samples = sft.eval_freq > 0
        roles = place(config, [ACTOR, ROLLOUT] if samples else [ACTOR], num_ranks)
        longest = cls.check_data(config, "prompts and answers")
        if sft.stop_at_score is not None and not samples:
            raise ConfigError(
                f"sft.stop_at_score={sft.stop_at_score} needs evaluations; set sft.eval_freq to 1 or more"
            )
        if samples:
            check_algorithms(config, {"reward": config.reward.reward_manager.name})
        if samples and config.rollout.engine != "native":
            raise ConfigError(
                f"rollout.engine={config.rollout.engine} is not for the evaluations of `hpcrl sft`; "
                "use rollout.engine=native there, or sft.eval_freq=-1"
            )
        check_budget("sft.max_token_len_per_gpu", sft.max_token_len_per_gpu, longest)
        rows = [("longest sequence", longest, "tokens"), ("step", sft.batch_size, "samples")]
        return RoleLayouts(num_ranks, roles, rows)

    def read_inputs(self) -> Inputs:
        from hpcrl.workers.team import Inputs, add_validation_prompts, data_config, read_model

        tokenizer, shape = read_model(self.config)
        data, columns = data_config(self.config), {"sft.answer_key": self.own.answer_key}
        answers = AnswerDataset(data.train_files, tokenizer, data, columns, data.train_max_samples, self.world)
        inputs = Inputs(shape, tokenizer, {"train": answers.prompts}, answers)
        add_validation_prompts(inputs, self.config, self.world)
        return inputs

    def roles(self) -> list[RoleSpec]:
        actor = replace(ACTOR, worker="hpcrl.workers.supervised:SftActorWorker")
        data = RoleSpec("data", "hpcrl.workers.supervised:SftDataWorker", on=("actor",))
        return [actor, data, *self.export_roles, *([ROLLOUT, SCORER, REFIT] if "rollout" in self.derived.roles else [])]

    def set_up(self, run: Run) -> None:
        self.validator = None
        if self.own.eval_freq > 0:
            ways = [ValKwargs(n=1, temperature=1.0)]
            self.validator = Validator(
                run.controller, self.config, self.inputs, ways, num_prompts=self.own.eval_samples
            )

    def validate(self, run: Run, step: int) -> tuple[dict[str, float], str]:
        """Sample some validation prompts at temperature 1; end the run if the accuracy reaches sft.stop_at_score."""
        assert self.validator is not None
        run.controller["refit"].update_weights().get()
        metrics, shown = self.validator.run(step)
        score = float(np.mean([value for name, value in metrics.items() if name.startswith("val-core/")]))
        wanted = self.own.stop_at_score
        if wanted is not None and score >= wanted:
            run.complete(f"accuracy reached sft.stop_at_score={wanted:g}")
        return metrics, shown

    def progress(self, metrics: dict[str, float]) -> dict[str, float]:
        shown = {name.split("/")[-1]: value for name, value in metrics.items() if name.startswith("val-core/")}
        return {"loss": metrics["train/loss"], **shown}

    def state(self, step: int) -> dict[str, int]:
        return {"consumed_rows": step * self.own.batch_size}


JOB = Sft
