"""policy, from conversations and answers: supervised fine-tuning"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.packing import balanced_assignment
from hpcrl.config.derive import RoleLayouts, check_budget
from hpcrl.config.plugins import check_algorithms
from hpcrl.config.roles import ACTOR, REFIT, ROLLOUT, SCORER, RoleSpec, place
from hpcrl.config.schema import Config, OptimConfig, ValKwargs
from hpcrl.config.yaml_core import ConfigError
from hpcrl.controller.controller import replica_column
from hpcrl.data.conversations import Turns
from hpcrl.data.image_loader import tower_tokens
from hpcrl.data.row_file import columns_of
from hpcrl.data.supervision import SftDataset, Supervised, has_targets
from hpcrl.rollout.environments.tools import data_config
from hpcrl.run.calls import metrics_of
from hpcrl.run.job import SupervisedConfig, SupervisedJob, SupervisedValidation
from hpcrl.run.job_parts import Report
from hpcrl.run.validation import Validator
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpcrl.run.run import Run
    from hpcrl.workers.team import Inputs

log = logging.getLogger(__name__)


class SftConfig(SupervisedConfig):
    """`hpcrl sft`: supervised fine-tuning on data.train_files, loss on the assistant's turns or the answer."""

    messages_key: str = Field(
        "messages", description="column of conversations; files without it have prompts and answers"
    )
    assistant_turns: Turns = Field("all", description="turns of a conversation that have loss: all, or the last")
    answer_key: str = Field("answer", description="column that holds the answer text")
    loss_type: Literal["nll", "dft"] = Field(
        "nll", description="nll: cross-entropy; dft: each token's weighted by its probability"
    )
    optim: OptimConfig = Field(default_factory=lambda: OptimConfig(lr=2e-3), description="optimizer")
    eval_loss: bool = Field(
        True, description="evaluate loss and perplexity, if data.val_files have conversations or answers"
    )
    eval_score: bool = Field(True, description="sample a response to each validation prompt, and score it")
    stop_at_score: float | None = Field(
        None, description="stop once validation accuracy at temperature 1 reaches this; null: run all steps"
    )


class SftReport(Report):
    shown = {"loss": "train/loss", "val_loss": "val/loss"}


class SftValidation(SupervisedValidation):
    """Loss and perplexity of validation rows; the accuracy of samples at temperature 1, which ends the run if it
    reaches sft.stop_at_score."""

    validator: Validator | None = None  # of samples

    def set_up(self, run: Run) -> None:
        inputs, config = self.job.inputs, self.job.config
        if "val" in inputs.prompts:
            ways = [ValKwargs(n=1, temperature=1.0)]
            self.validator = Validator(run.controller, config, inputs, ways, num_prompts=self.job.own.eval_samples)

    def run(self, run: Run, step: int) -> tuple[dict[str, float], str]:
        job: Sft = self.job
        metrics: dict[str, float] = {}
        shown = ""
        if "val" in job.inputs.sequences:
            rows = np.arange(len(job.inputs.sequences["val"]), dtype=np.int64)
            batch = job.balanced("val", rows)
            batch = batch.union(run.controller["data"].load(batch).get())
            metrics |= metrics_of(run.controller["actor"].evaluate(batch).get())
            metrics["val/perplexity"] = math.exp(min(metrics["val/loss"], 700.0))
        if self.validator is not None:
            run.controller["refit"].update_weights().get()
            sampled, shown = self.validator.run(step)
            metrics |= sampled
            score = float(np.mean([value for name, value in sampled.items() if name.startswith("val-core/")]))
            target = job.own.stop_at_score
            if target is not None and score >= target:
                run.complete(f"accuracy reached sft.stop_at_score={target:g}")
        return metrics, shown


class Sft(SupervisedJob):
    """Cross-entropy on given tokens, with the engine and the layouts of the actor."""

    name = "sft"
    section = SftConfig
    report_class, validation_class = SftReport, SftValidation
    memory_advice = (
        "a smaller sft.max_token_len_per_gpu, model.recompute.granularity=full, a larger placement.actor.tp or pp"
    )
    lengths: dict[str, np.ndarray]  # split -> tokens of each row, int64; on rank 0

    def loop(self, run: Run) -> None:
        data, actor = run.roles("data", "actor")
        for step in run.steps():  # between two steps: wait, log, evaluate, save, stop if asked to
            rows = self.next_rows(run, self.lengths["train"])
            batch = data.load(self.balanced("train", rows, step=step))  # sequences, and which of their tokens have loss
            self.load_ahead(run, partial(self.balanced, "train"))
            actor.update(batch)

    def balanced(self, split: str, rows: np.ndarray, **meta_info: int) -> DataProto:
        """The rows as a batch, with balanced tokens and work of a trained vision tower on the replicas."""
        dp = self.derived.roles["actor"].dp
        tower = tower_tokens(self.inputs.sequences[split], rows, self.inputs.shape)
        replicas = balanced_assignment(self.lengths[split][rows] + tower, dp)
        return DataProto({}, {"row": rows, replica_column(dp): replicas}, {"split": split, **meta_info})

    @classmethod
    def check(cls, config: Config, num_ranks: int) -> RoleLayouts:
        """It trains on the actor's ranks, and samples on the rollout's."""
        sft = config.section("sft")
        samples = sft.eval_freq > 0 and sft.eval_score
        roles = place(config, [ACTOR, ROLLOUT] if samples else [ACTOR], num_ranks)
        longest = cls.check_data(config, "conversations, or of prompts and answers")
        if sft.stop_at_score is not None and not samples:
            raise ConfigError(
                f"sft.stop_at_score={sft.stop_at_score} needs evaluations; set sft.eval_freq to 1 or more, and "
                "sft.eval_score=true"
            )
        if samples:
            check_algorithms(config, {"reward": config.reward.reward_manager.name})
        if samples and "evaluations" not in config.engine.supports:
            raise ConfigError(
                f"rollout.engine={config.rollout.engine} is not for the evaluations of `hpcrl sft`; "
                "use rollout.engine=native there, or sft.eval_score=false"
            )
        if sft.eval_freq > 0 and not (sft.eval_loss or sft.eval_score):
            raise ConfigError(
                f"sft.eval_freq={sft.eval_freq} evaluates, and sft.eval_loss and sft.eval_score are false; set one"
            )
        check_budget("sft.max_token_len_per_gpu", sft.max_token_len_per_gpu, longest)
        rows = [("longest sequence", longest, "tokens"), ("step", sft.batch_size, "samples")]
        return RoleLayouts(num_ranks, roles, rows)

    def read_inputs(self) -> Inputs:
        from hpcrl.workers.team import Inputs, add_validation_prompts, image_processor, read_model

        tokenizer, shape = read_model(self.config)
        images = image_processor(self.config, shape)
        data, own, inputs = data_config(self.config), self.own, Inputs(shape, tokenizer, images=images)
        splits = {"train": (data.train_files, data.train_max_samples)}
        evaluates = own.eval_freq > 0
        if evaluates and own.eval_loss and has_targets(data.val_files, own.messages_key, own.answer_key, data.format):
            splits["val"] = (
                data.val_files,
                own.eval_samples if data.val_max_samples < 0 else min(own.eval_samples, data.val_max_samples),
            )
        for split, (files, num) in splits.items():
            inputs.sequences[split] = self.read_rows(files, tokenizer, images=images, max_samples=num)
        self.order_rows(inputs.sequences["train"].file_sizes)
        if evaluates and "val" not in splits and not own.eval_score:
            raise InputError(
                f"{data.val_files[0]}: no column {own.messages_key!r} or {own.answer_key!r} in every validation file, "
                "and sft.eval_score=false: there is nothing to evaluate; add the column, or set sft.eval_freq=-1"
            )
        if evaluates and own.eval_score:
            for path in data.val_files:
                if data.prompt_key not in columns_of(path, data.format):
                    raise InputError(
                        f"{path}: no column {data.prompt_key!r} of prompts to sample for; name it in data.prompt_key, "
                        "or set sft.eval_score=false, which leaves loss and perplexity"
                    )
            add_validation_prompts(inputs, self.config, self.world, "sft.eval_score=false, which samples nothing")
        return inputs

    def read_rows(self, paths: Sequence[str], tokenizer: PreTrainedTokenizerBase, **which: Any) -> SftDataset:
        return SftDataset(
            paths,
            tokenizer,
            data_config(self.config),
            messages_key=self.own.messages_key,
            answer_key=self.own.answer_key,
            turns=self.own.assistant_turns,
            world=self.world,
            **which,
        )

    def supervised(self, dataset: SftDataset, row: int) -> list[Supervised]:
        prompt, response, mask = dataset.sequence(row)
        return [Supervised.of("", prompt, response, mask)]

    def roles(self) -> list[RoleSpec]:
        actor = replace(ACTOR, worker="hpcrl.workers.supervised:SftActorWorker")
        data = RoleSpec("data", "hpcrl.workers.supervised:SftDataWorker", on=("actor",))
        return [
            actor,
            data,
            *self.models.exported,
            *([ROLLOUT, SCORER, REFIT] if "rollout" in self.derived.roles else []),
        ]

    def set_up(self, run: Run) -> None:
        self.lengths = {}
        for split, data in self.inputs.sequences.items():
            self.lengths[split] = data.lengths()
            log.info(
                "%s: %d sequences of %.0f tokens in the mean, %d too long",
                split,
                len(data),
                self.lengths[split].mean(),
                data.num_filtered,
            )
            if data.num_endless:
                log.warning(
                    "%s: %d conversations end without an end-of-sequence token, so that the model does not learn to "
                    "stop; expected one at the end of the chat template's assistant turns",
                    split,
                    data.num_endless,
                )
        self.log_first_row(self.inputs.sequences["train"])


JOB = Sft
