"""Validation: sample the held-out prompts, score them, say how good they are, keep some to read."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrl.batch.data_proto import DataProto
from hpcrl.config.schema import Config, DataConfig, ValKwargs
from hpcrl.controller.controller import Controller
from hpcrl.data.prompts import PromptDataset
from hpcrl.rollout.protocol import SamplingParams
from hpcrl.rollout_source.scoring import score
from hpcrl.run.validation_metrics import SEED, Variables, metric_tags, validation_metrics
from hpcrl.telemetry.writer import generations_table, write_generations

if TYPE_CHECKING:
    from hpcrl.workers.team import Inputs

log = logging.getLogger(__name__)


class Validator:
    """Runs on rank 0. The same random numbers are used at every validation, so that a change is the model's.

    num_prompts: validate on the first ones only. num_shown: samples of each way in the table. folder: where every
    sample is written as `<step>.jsonl`.
    """

    def __init__(
        self,
        controller: Controller,
        prompts: PromptDataset,
        data: DataConfig,
        ways: Sequence[ValKwargs],
        eos_token_ids: tuple[int, ...],
        *,
        num_prompts: int | None = None,
        num_shown: int = 0,
        folder: Path | None = None,
        with_model: bool = False,
    ) -> None:
        self.controller = controller
        self.prompts = prompts
        self.data = data
        self.ways = sorted(ways, key=lambda way: way.n)
        self.eos_token_ids = eos_token_ids
        self.rows = np.arange(min(num_prompts or len(prompts), len(prompts)), dtype=np.int64)
        self.num_shown = num_shown
        self.folder = folder
        self.with_model = with_model
        self.sources = np.array([source or "unknown" for source in prompts.source_of_rows()], object)[self.rows]
        texts = [prompts.prompt_text(row, skip_special_tokens=True) for row in self.rows.tolist()] if num_shown else []
        self.text_rank = np.unique(np.array(texts, object), return_inverse=True)[1]

    @classmethod
    def of_job(cls, controller: Controller, config: Config, inputs: Inputs, folder: Path) -> Validator:
        """The validation that the template asks for; `folder` is where validation_data_dir goes."""
        generations = config.trainer.validation_data_dir
        return cls(
            controller,
            inputs.prompts["val"],
            config.data,
            config.rollout.val_kwargs,
            (int(inputs.tokenizer.eos_token_id),),
            num_shown=config.trainer.log_val_generations,
            folder=folder / generations if generations else None,
            with_model=config.reward.reward_model.enable,
        )

    def run(self, step: int) -> tuple[dict[str, float], str]:
        """Metrics, and Markdown tables of some samples.

        Metrics are those of `validation_metrics`; where two ways of sampling give the same one, such as worst@2, it is
        that of the way with fewer samples.
        """
        metrics: dict[str, float] = {}
        failures: dict[str, float] = defaultdict(float)
        written: list[dict[str, Any]] = []
        tables = []
        for way in self.ways:
            shown = shown_rows(self.text_rank, way.n, self.num_shown)
            batch = self._sample(way, shown)
            sources, uids = (np.repeat(column, way.n).tolist() for column in (self.sources, self.rows))
            found = metric_tags(validation_metrics(sources, uids, variables_of(batch.samples)))
            found[f"val-aux/response_length/mean@{way.n}"] = float(batch.samples["response_length"].mean())
            if "num_turns" in batch.samples:
                turns = batch.samples["num_turns"]
                values = {"min": turns.min(), "max": turns.max(), "mean": turns.mean()}
                found |= {f"val-aux/num_turns/{name}": float(value) for name, value in values.items()}
            metrics |= {tag: value for tag, value in found.items() if tag not in metrics}
            for name, count in _failures(batch).items():
                failures[f"val-aux/{name}"] += count
            if shown:
                label = f"n = {way.n}, temperature {temperature_of(way):g}"
                tables.append(f"{label}\n\n{generations_table(self._generations(batch, shown, way, step))}")
            if self.folder is not None:
                written += self._generations(batch, range(len(batch)), way, step)
        if self.folder is not None:
            try:
                write_generations(self.folder / f"{step}.jsonl", written)
            except OSError as error:
                log.warning("the generations of step %d are not written: %s", step, error)
        return metrics | failures, "\n\n".join(tables)

    def _sample(self, way: ValKwargs, shown: Sequence[int]) -> DataProto:
        n = way.n
        rows = np.repeat(self.rows, n)
        show = np.full(len(rows), self.folder is not None)
        show[shown] = True
        samples = {
            "row": rows,
            "epoch": np.zeros(len(rows), np.int64),
            "sample_index": np.tile(np.arange(n, dtype=np.int64), len(self.rows)),
            "show": show,
        }
        batch = DataProto({}, samples, {"split": "val", "step": 0})
        sampling = SamplingParams(
            max_new_tokens=self.data.max_response_length,
            temperature=temperature_of(way),
            top_k=way.top_k,
            top_p=way.top_p,
            eos_token_ids=self.eos_token_ids,
        )
        batch = batch.union(self.controller["rollout"].generate(batch, sampling).get())
        return score(self.controller, batch, with_model=self.with_model)

    def _generations(self, batch: DataProto, rows: Sequence[int], way: ValKwargs, step: int) -> list[dict[str, Any]]:
        """Samples with the keys of verl's dumps, and `n`, the samples per prompt of the way they were drawn."""
        samples = batch.samples
        found = []
        for row in rows:
            prompt, score, acc = int(samples["row"][row]), float(samples["score"][row]), float(samples["acc"][row])
            found.append(
                {
                    "input": samples["prompt_text"][row],
                    "output": samples["response_text"][row],
                    "gts": self.prompts.record(prompt)["ground_truth"],
                    "score": score,
                    "step": step,
                    "reward": score,
                    **({} if np.isnan(acc) else {"acc": acc}),
                    **samples["extras"][row],
                    "uid": self.prompts.uid(prompt, 0),
                    "n": way.n,
                }
            )
        return found


def temperature_of(way: ValKwargs) -> float:
    return 0.0 if way.do_sample is False else way.temperature


def shown_rows(text_rank: np.ndarray, n: int, count: int) -> list[int]:
    """Samples in the table, of n samples of each prompt, as verl takes them: the first `count` of all samples sorted by
    prompt text (`text_rank`: each prompt's place in that order) and then shuffled, in the same way every time."""
    order = np.argsort(np.repeat(text_rank, n), kind="stable").tolist()
    np.random.RandomState(SEED).shuffle(order)
    return order[:count]


def variables_of(samples: Mapping[str, np.ndarray]) -> Variables:
    """What metrics are made of: `reward`, `acc`, and all else that the scorer returned; None where it did not."""
    extras = samples["extras"].tolist()
    names = dict.fromkeys(name for extra in extras for name in extra if name not in ("reward", "acc"))
    return {
        "reward": samples["score"].tolist(),
        "acc": [None if np.isnan(acc) else acc for acc in samples["acc"].tolist()],
        **{name: [extra.get(name) for extra in extras] for name in names},
    }


def _failures(batch: DataProto) -> dict[str, float]:
    """How many scores failed, summed over replicas."""
    counts: dict[str, float] = defaultdict(float)
    for part in batch.metrics:
        for name, metric in part.items():
            if name.startswith("reward/"):
                counts[name] += metric.finish()
    return dict(counts)
