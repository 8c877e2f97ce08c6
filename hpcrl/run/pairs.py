"""What jobs on pairs of answers share: their data, its check, evaluation, and the reference's log-probs.

The reference's log-probs of a whole data set are computed once and kept in the run directory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from hpcrl.algorithms.preference_losses import PREFERENCE_LOSSES, PreferenceLoss
from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.packing import balanced_assignment
from hpcrl.config.derive import RoleLayouts, check_budget
from hpcrl.config.roles import RoleSpec, place
from hpcrl.config.schema import Config
from hpcrl.config.yaml_core import ConfigError
from hpcrl.controller.controller import replica_column
from hpcrl.data.answers import CHOSEN, REJECTED, AnswerDataset
from hpcrl.data.image_loader import tower_tokens
from hpcrl.data.supervision import Supervised
from hpcrl.run.calls import metrics_of
from hpcrl.run.job import SupervisedConfig, SupervisedJob, SupervisedValidation
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox.new_files import draft_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpcrl.run.run import Run
    from hpcrl.workers.team import Inputs

log = logging.getLogger(__name__)

REF_LOGPS_FILE = "ref_logps.npz"
PAIRS_AT_ONCE = 1024


class RefLogps:
    """values: split -> float32 (number of pairs, 2), NaN where they are not computed yet. Lives on rank 0.

    The file has the values of a key, which stands for the data and the weights; those of another key are not read.
    """

    def __init__(self, path: Path, key: str, sizes: Mapping[str, int]) -> None:
        """Read the values that the file has.

        Args:
            sizes: split -> number of pairs.
        """
        self.path, self.key = path, key
        self.values = {split: np.full((size, 2), np.nan, np.float32) for split, size in sizes.items()}
        self._read()

    @property
    def num_missing(self) -> int:
        """Pairs whose values are not computed yet."""
        return sum(int(np.isnan(values).any(1).sum()) for values in self.values.values())

    def fill(self, compute: Callable[[str, np.ndarray], np.ndarray | None]) -> bool:
        """Compute what is missing, and write the file with what is computed so far. Returns whether nothing is missing.

        compute(split, rows): float32 (2 * number of rows,), chosen and rejected in turn; None: stop here.
        """
        try:
            for split, rows in self._missing():
                if (values := compute(split, rows)) is None:
                    return False
                self.values[split][rows] = values.reshape(-1, 2)
            return True
        finally:
            self._write()

    def of(self, split: str, rows: np.ndarray) -> np.ndarray:
        """Log-probs of chosen and rejected of these rows in turn, float32 (2 * number of rows,)."""
        return self.values[split][rows].reshape(-1)

    def _missing(self) -> Iterator[tuple[str, np.ndarray]]:
        """(split, rows) of what is not computed yet. Which rows come together does not depend on what is computed, so
        that an interrupted pass has the values of an uninterrupted one."""
        for split, values in self.values.items():
            for start in range(0, len(values), PAIRS_AT_ONCE):
                rows = np.arange(start, min(start + PAIRS_AT_ONCE, len(values)))
                if np.isnan(values[rows]).any():
                    yield split, rows

    def _read(self) -> None:
        try:
            with np.load(self.path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read and is computed again: %s", self.path, error)
            return
        if str(arrays.pop("key", "")) != self.key:
            log.info("%s is of other data or start weights", self.path)
            return
        for split, values in self.values.items():
            rows = min(len(values), len(arrays.get(split, ())))
            if rows:
                values[:rows] = arrays[split][:rows]

    def _write(self) -> None:
        with draft_of(self.path) as draft, draft.open("wb") as file:
            np.savez(file, allow_pickle=False, key=np.array(self.key), **self.values)
            file.flush()
            os.fsync(file.fileno())


def ref_logps_key(datasets: Mapping[str, AnswerDataset], *further: object) -> str:
    """A hash of all token ids, and of what else the values depend on."""
    digest = blake2b(repr(further).encode(), digest_size=16)
    for split, dataset in datasets.items():
        digest.update(split.encode())
        for row in range(len(dataset)):
            for ids in (*dataset.pair(row, CHOSEN), dataset.answer(row, REJECTED)):
                digest.update(len(ids).to_bytes(4, "little") + ids.tobytes())
    return digest.hexdigest()


class PairsConfig(SupervisedConfig):
    chosen_key: str = Field("chosen", description="column that holds the better answer")
    rejected_key: str = Field("rejected", description="column that holds the worse answer")


def check_loss(section: str, own: Any) -> PreferenceLoss:
    """The loss on pairs or labelled answers that a section names, if its parameters go together."""
    loss = PREFERENCE_LOSSES.get(own.loss_type)
    if own.loss_type == "exo_pair" and own.label_smoothing == 0:
        raise ConfigError(f"{section}.loss_type=exo_pair needs {section}.label_smoothing above 0, such as 0.001")
    return loss


class PairsValidation(SupervisedValidation):
    def run(self, run: Run, step: int) -> tuple[dict[str, float], str]:
        """Metrics of the loss over the first validation pairs."""
        job: PairsJob = self.job
        rows = np.arange(min(job.own.eval_samples, len(job.inputs.pairs["val"])), dtype=np.int64)
        batch = job.pairs("val", rows)
        batch = job.with_reference(run, batch.union(run.controller["data"].load(batch).get()))
        return metrics_of(run.controller[job.trained_role].evaluate(batch).get()), ""


class PairsJob(SupervisedJob):
    """A job that trains one role on chosen and rejected answers; its section is a `PairsConfig`."""

    validation_class = PairsValidation
    side_note: ClassVar[str] = ""  # what is said of each where an example is shown

    @classmethod
    def check_pairs(
        cls, config: Config, roles: Sequence[RoleSpec], num_ranks: int, *, paired: bool = True
    ) -> RoleLayouts:
        """Layouts of these roles, if the data and the tokens of a micro-batch allow them.

        Args:
            paired: whether both sequences of a pair are in one micro-batch.
        """
        own = cls.section_of(config)
        placed = place(config, roles, num_ranks)
        longest = cls.check_data(config, "chosen and rejected answers" if paired else "answers with labels")
        check_budget(f"{cls.name}.max_token_len_per_gpu", own.max_token_len_per_gpu, longest)
        if paired and own.max_token_len_per_gpu < 2 * longest:
            raise ConfigError(
                f"{cls.name}.max_token_len_per_gpu={own.max_token_len_per_gpu} holds no pair of the longest sequences, "
                f"2 * (data.max_prompt_length + data.max_response_length) = {2 * longest}; use {2 * longest} or more"
            )
        rows = [("longest sequence", longest, "tokens"), ("step", 2 * own.batch_size, "samples")]
        return RoleLayouts(num_ranks, placed, rows)

    def read_inputs(self) -> Inputs:
        from hpcrl.workers.team import Inputs, image_processor, read_model

        tokenizer, shape = read_model(self.config)
        inputs, data = Inputs(shape, tokenizer, images=image_processor(self.config, shape)), self.config.data
        files = {"train": (data.train_files, data.train_max_samples), "val": (data.val_files, data.val_max_samples)}
        for split, (paths, max_samples) in files.items():
            if split == "train" or self.own.eval_freq > 0:
                inputs.pairs[split] = self.read_rows(paths, tokenizer, images=inputs.images, max_samples=max_samples)
        self.check_answers(inputs.pairs["train"])
        self.order_rows(inputs.pairs["train"].file_sizes)
        return inputs

    def read_rows(self, paths: Sequence[str], tokenizer: PreTrainedTokenizerBase, **which: Any) -> AnswerDataset:
        columns = {f"{self.name}.{side}_key": getattr(self.own, f"{side}_key") for side in ("chosen", "rejected")}
        return AnswerDataset(paths, tokenizer, self.config.data, columns, world=self.world, **which)

    def supervised(self, dataset: AnswerDataset, row: int) -> list[Supervised]:
        sides = {"chosen": CHOSEN, "rejected": REJECTED}
        return [Supervised.of(f"{name}{self.side_note}", *dataset.pair(row, side)) for name, side in sides.items()]

    def check_answers(self, dataset: AnswerDataset) -> None:
        """Raise InputError if nothing can be learned from the training data."""
        if dataset.num_equal == len(dataset):
            raise InputError(
                f"data.train_files: in all {len(dataset)} pairs {self.own.chosen_key!r} and {self.own.rejected_key!r} "
                f"are the same; expected answers that differ: check {self.name}.chosen_key and {self.name}.rejected_key"
            )

    def set_up(self, run: Run) -> None:
        self.pair_lengths = {}  # tokens of both sequences of a pair together, int64 (number of pairs,)
        for split, dataset in self.inputs.pairs.items():
            self.pair_lengths[split] = self.lengths_of(dataset)
            log.info("%s: %s; %d too long", split, self.described(dataset), dataset.num_filtered)
        if (count := len(self.inputs.pairs["train"])) < self.own.batch_size:
            log.warning(
                "data.train_files has %d rows, fewer than %s.batch_size=%d: a step takes some of them several times",
                *(count, self.name, self.own.batch_size),
            )
        self.log_first_row(self.inputs.pairs["train"])

    def lengths_of(self, dataset: AnswerDataset) -> np.ndarray:
        """Tokens of each pair, int64 (len,)."""
        return dataset.lengths(CHOSEN) + dataset.lengths(REJECTED)

    def described(self, dataset: AnswerDataset) -> str:
        """What the log says of a data set."""
        num_equal = dataset.num_equal
        equal = f", in {num_equal} of which both answers are the same" if num_equal else ""
        return f"{len(dataset)} pairs{equal}"

    def next_pairs(self, run: Run, step: int) -> DataProto:
        """The pairs that a step trains on, for the data worker to load."""
        batch = self.pairs("train", self.next_rows(run, self.pair_lengths["train"]))
        batch.meta_info["step"] = step
        return batch

    def pairs(self, split: str, rows: np.ndarray) -> DataProto:
        """Chosen and rejected of each pair on one replica of each role, with tokens, and the work of a trained vision
        tower, balanced over replicas."""
        work = self.pair_lengths[split][rows] + 2 * tower_tokens(self.inputs.pairs[split], rows, self.inputs.shape)
        samples = {"row": np.repeat(rows, 2), "side": np.tile(np.array([CHOSEN, REJECTED]), len(rows))}
        for dp in {layout.dp for layout in self.derived.roles.values()}:
            samples[replica_column(dp)] = np.repeat(balanced_assignment(work, dp), 2)
        return DataProto({}, samples, {"split": split})

    def with_reference(self, run: Run, batch: DataProto) -> DataProto:
        """The batch with what the trained role's `evaluate` reads besides its sequences."""
        return batch
