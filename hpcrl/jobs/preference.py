"""policy, from preferences: DPO and its relatives, KTO"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from hpcrl.algorithms.preference_losses import PREFERENCE_LOSSES, PreferenceLoss, PreferenceParameters
from hpcrl.batch.data_proto import DataProto
from hpcrl.config.derive import RoleLayouts
from hpcrl.config.roles import ACTOR, REF, RoleSpec
from hpcrl.config.schema import Config, OptimConfig
from hpcrl.config.yaml_core import ConfigError
from hpcrl.data.answers import AnswerDataset, LabelledDataset
from hpcrl.data.supervision import Supervised
from hpcrl.run.job import SupervisedModels
from hpcrl.run.job_parts import Report
from hpcrl.run.pairs import REF_LOGPS_FILE, PairsConfig, PairsJob, RefLogps, check_loss, ref_logps_key
from hpcrl.run.recovery import origin_of
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpcrl.run.run import Run

log = logging.getLogger(__name__)


class PreferenceConfig(PairsConfig, PreferenceParameters):
    """`hpcrl preference`: DPO and its relatives on pairs of answers in data.train_files, KTO on labelled answers."""

    loss_type: str = Field("sigmoid", description="name of a registered preference loss; sigmoid is DPO")
    completion_key: str = Field("completion", description="kto: column that holds the answer")
    label_key: str = Field("label", description="kto: column that says whether the answer is good: true or false")
    precompute_ref_log_probs: bool = Field(
        False,
        description="compute the reference's log-probs of all pairs before the first step, with the policy's start "
        "weights, and keep them in the run directory: there is no reference model in memory",
    )
    optim: OptimConfig = Field(default_factory=lambda: OptimConfig(lr=1e-6), description="optimizer")


class PreferenceReport(Report):
    @property
    def shown(self) -> dict[str, str]:  # type: ignore[override]
        best = "accuracies" if self.job.loss.paired else "margins"
        return {"loss": "train/loss", best: f"rewards/{best}", f"val_{best}": f"val/rewards/{best}"}


class PreferenceModels(SupervisedModels):
    def stands_for(self, role: str) -> str:
        is_ref = role == "ref" and self.job.loss.reference and not self.job.precomputes
        return "actor" if is_ref and "ref" not in self.job.derived.roles else role


class Preference(PairsJob):
    """The policy learns which answer of a pair is better, or, with KTO, which answers are good."""

    name = "preference"
    section = PreferenceConfig
    report_class, models_class = PreferenceReport, PreferenceModels
    ref_logps: RefLogps  # on rank 0, where they are computed before the first step
    memory_advice = (
        "a smaller preference.max_token_len_per_gpu, model.recompute.granularity=full, a larger placement.actor.tp"
    )

    def loop(self, run: Run) -> None:
        data, ref, actor = run.roles("data", "ref", "actor")
        self.precompute_ref_log_probs(run)
        for step in run.steps():  # between two steps: wait, log, evaluate, save, stop if asked to
            batch = data.load(self.next_pairs(run, step))  # chosen and rejected, next to each other
            self.load_ahead(run, partial(self.pairs, "train"))
            actor.update(ref.compute_ref_log_prob(batch))  # adds nothing, where they are kept or the loss needs none

    @classmethod
    def check(cls, config: Config, num_ranks: int) -> RoleLayouts:
        """It trains on the actor's ranks. The reference of a policy with adapters is the policy without them."""
        own = config.section("preference")
        loss = check_loss(cls.name, own)
        if not loss.paired and own.batch_size == 1:
            raise ConfigError(
                f"preference.batch_size=1: preference.loss_type={own.loss_type} compares with the answers of other "
                "rows of a step; use 2 or more"
            )
        if not loss.paired and own.precompute_ref_log_probs:
            raise ConfigError(
                f"preference.precompute_ref_log_probs=true is for pairs: preference.loss_type={own.loss_type} compares "
                "each answer with another one in every epoch; use false"
            )
        reference = loss.reference and config.model.lora_rank == 0 and not own.precompute_ref_log_probs
        return cls.check_pairs(config, [ACTOR, REF] if reference else [ACTOR], num_ranks, paired=loss.paired)

    @classmethod
    def without_effect(cls, config: Config) -> list[str]:
        own = config.section("preference")
        if own.precompute_ref_log_probs and not PREFERENCE_LOSSES.get(own.loss_type).reference:
            return [f"preference.precompute_ref_log_probs: loss_type={own.loss_type} has no reference"]
        return []

    @property
    def precomputes(self) -> bool:
        return self.loss.reference and self.own.precompute_ref_log_probs

    def set_up(self, run: Run) -> None:
        super().set_up(run)
        if not self.precomputes:
            return
        datasets, config, init_from = self.inputs.pairs, self.config, run.start.init_from
        shape, drawn = self.inputs.shape, (self.inputs.shape, config.run.seed)
        ids = [shape.softmax_size] if shape.softmax_size < shape.vocab_size else []
        key = ref_logps_key(
            datasets, config.model.dtype, origin_of(init_from) if init_from is not None else drawn, *ids
        )
        sizes = {split: len(dataset) for split, dataset in datasets.items()}
        if "val" in sizes:
            sizes["val"] = min(sizes["val"], self.own.eval_samples)
        self.ref_logps = RefLogps(run.folder / REF_LOGPS_FILE, key, sizes)
        missing = self.ref_logps.num_missing
        if missing and run.step > 0 and config.model.lora_rank == 0:
            raise InputError(
                f"{self.ref_logps.path} lacks reference log-probs of {missing} pairs, and after {run.step} steps the "
                "policy is no longer the reference; restore the file, with the data that it is of, or use "
                "preference.precompute_ref_log_probs=false"
            )

    def precompute_ref_log_probs(self, run: Run) -> None:
        """Compute those that the run directory does not hold yet; the policy is the reference then."""
        if not self.precomputes or not self.ref_logps.num_missing:
            return
        data, actor = run.controller["data"], run.controller["actor"]

        def compute(split: str, rows: np.ndarray) -> np.ndarray | None:
            if run.has_to_stop("ref"):
                return None
            with run.timers("ref"):
                batch = self.sequences(split, rows)
                batch = batch.union(data.load(batch).get())
                return actor.compute_ref_log_prob(batch).get().samples["ref_logps"]

        log.info("computing the reference's log-probs of %d pairs", self.ref_logps.num_missing)
        start = time.perf_counter()
        if not self.ref_logps.fill(compute):
            return
        log.info("%s is written after %.1f s", self.ref_logps.path, time.perf_counter() - start)
        run.timers.collect()  # times and traffic belong to no step
        run.controller.collect_traffic()

    @property
    def loss(self) -> PreferenceLoss:
        return PREFERENCE_LOSSES.get(self.own.loss_type)

    def read_rows(self, paths: Sequence[str], tokenizer: PreTrainedTokenizerBase, **which: Any) -> AnswerDataset:
        if self.loss.paired:
            return super().read_rows(paths, tokenizer, **which)
        columns = {"preference.completion_key": self.own.completion_key}
        which |= {"label": ("preference.label_key", self.own.label_key), "world": self.world}
        return LabelledDataset(paths, tokenizer, self.config.data, columns, **which)

    def supervised(self, dataset: AnswerDataset, row: int) -> list[Supervised]:
        if isinstance(dataset, LabelledDataset):
            return [Supervised.of("good answer" if dataset.labels[row] else "bad answer", *dataset.pair(row))]
        chosen, rejected = super().supervised(dataset, row)
        if self.loss.nll_of_prompt:  # all tokens that have one before them
            chosen = chosen._replace(mask=np.arange(len(chosen.ids)) > 0)
        return [chosen, rejected]

    def check_answers(self, dataset: AnswerDataset) -> None:
        if not isinstance(dataset, LabelledDataset):
            super().check_answers(dataset)
        elif len(np.unique(dataset.labels)) == 1:
            raise InputError(
                f"data.train_files: all {len(dataset)} labels in {self.own.label_key!r} are "
                f"{str(dataset.labels[0]).lower()}; preference.loss_type={self.own.loss_type} learns from good and bad "
                "answers: expected both"
            )

    def lengths_of(self, dataset: AnswerDataset) -> np.ndarray:
        return 2 * dataset.lengths() if isinstance(dataset, LabelledDataset) else super().lengths_of(dataset)

    def described(self, dataset: AnswerDataset) -> str:
        if isinstance(dataset, LabelledDataset):
            return f"{len(dataset)} answers, {int(dataset.labels.sum())} of them good"
        return super().described(dataset)

    def pairs(self, split: str, rows: np.ndarray) -> DataProto:
        """As `PairsJob.pairs`, with the reference's log-probs where they are computed before."""
        batch = self.sequences(split, rows)
        if self.precomputes:
            batch.samples["ref_logps"] = self.ref_logps.of(split, rows)
        return batch

    def sequences(self, split: str, rows: np.ndarray) -> DataProto:
        """The sequences that the rows are compared by. For KTO, each row's answer, and after the same prompt the answer
        of the row before it in the step, as TRL pairs them in a micro-batch."""
        batch, dataset = super().pairs(split, rows), self.inputs.pairs[split]
        if isinstance(dataset, LabelledDataset):
            answer_row = np.stack([rows, np.roll(rows, 1)], axis=1).reshape(-1)
            batch.samples |= {
                "side": np.zeros_like(answer_row),
                "answer_row": answer_row,
                "label": dataset.labels[batch.samples["row"]],
            }
        batch.meta_info["nll_of_prompt"] = self.loss.nll_of_prompt
        return batch

    def with_reference(self, run: Run, batch: DataProto) -> DataProto:
        if not self.loss.reference or self.precomputes:
            return batch
        return batch.union(run.controller[self.models.stands_for("ref")].compute_ref_log_prob(batch).get())

    def roles(self) -> list[RoleSpec]:
        worker = "preference:PreferenceActorWorker" if self.loss.paired else "preference:KtoActorWorker"
        actor = replace(ACTOR, worker=f"hpcrl.workers.{worker}")
        ref = replace(REF, worker="hpcrl.workers.preference:PreferenceRefWorker")
        data = RoleSpec("data", "hpcrl.workers.supervised:PreferenceDataWorker", on=("actor",))
        return [actor, *([ref] if "ref" in self.derived.roles else []), data, *self.models.exported]


JOB = Preference
