"""Validation: sample the held-out prompts, score them, and compute verl's metrics.

The numbers are those of verl 0.9.1 (trainer/ppo/metric_utils.py, process_validation_metrics), in fp64. Its quirks:
every bootstrap starts from the same seed, so that prompts with equally many samples share their 1000 draws; `@N` itself
is bootstrapped too, with replacement, so best@N is below the best of the N; and a prompt has maj@n only when all of
its samples have a `pred`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from hpcrl.batch.data_proto import DataProto
from hpcrl.config.schema import Config, ValKwargs
from hpcrl.controller.controller import Controller
from hpcrl.data.tokenizer import end_token_ids
from hpcrl.observe.read.evaluation import Way
from hpcrl.observe.record.writer import generations_table, write_generations
from hpcrl.rewards.manager import has_acc
from hpcrl.rollout.protocol import SamplingParams
from hpcrl.run.job_parts import Validation
from hpcrl.run.rollouts.scoring import failed_scores, score
from hpcrl.runtime import run_owner

if TYPE_CHECKING:
    from hpcrl.run.inference import ProblemResults
    from hpcrl.run.run import Run
    from hpcrl.workers.team import Inputs


NUM_BOOTSTRAP = 1000
SEED = 42
CHUNK = 4_000_000  # numbers that are bootstrapped at once: 32 MB

Value: TypeAlias = float | int | bool | str | None
Variables: TypeAlias = Mapping[str, Sequence[Value]]  # name -> one value per sample, None where there is none
Found: TypeAlias = dict[str, dict[str, dict[str, float]]]  # data source -> variable -> metric -> value


def validation_metrics(sources: Sequence[str], uids: Sequence[Hashable], variables: Variables) -> Found:
    """Metrics of each data source and variable: the mean over prompts of what is computed per prompt.

    A variable is left out where a prompt's first value is text. `acc`, where a source has it at all, counts as 0 in the
    samples without it (their scoring failed); `acc_success_only` leaves those samples out.
    Per prompt with N values: `mean@N`; for N > 1 `std@N` (population), and for n in 2, 4, 8, ... < N and N
    `best@n/{mean,std}`, `worst@n/{mean,std}`, and with `pred` `maj@n/{mean,std}`: mean and standard deviation, over
    1000 draws of n values with replacement, of their maximum, minimum, and the value of the first draw whose `pred`
    is the commonest (the earliest drawn, where several are).

    Args:
        sources, uids: data source and prompt of each sample.
    """
    rows_of: dict[str, dict[Hashable, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, (source, uid) in enumerate(zip(sources, uids, strict=True)):
        rows_of[source][uid].append(row)
    metrics_of_source: Found = {}
    for source, prompts in rows_of.items():
        per_prompt: dict[str, dict[str, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
        for block in _blocks(list(prompts.values()), variables):
            for metric, values in block.metrics().items():
                for variable, of_prompts in zip(block.names, values, strict=True):
                    per_prompt[variable][metric].append(of_prompts)
        metrics_of_source[source] = {
            variable: {metric: float(np.concatenate(parts).mean()) for metric, parts in metrics.items()}
            for variable, metrics in per_prompt.items()
        }
    return metrics_of_source


def metric_tags(found: Found) -> dict[str, float]:
    """`val-core/<source>/<variable>/<metric>` for mean, best and maj of `acc` (without it: `reward`) at the largest
    number of samples, `val-aux/...` for everything else."""
    tags = {}
    for source, variables in found.items():
        core = "acc" if "acc" in variables else "reward"
        for variable, metrics in variables.items():
            most = max(int(metric.split("@")[1].split("/")[0]) for metric in metrics)
            for metric, value in metrics.items():
                is_core = variable == core and metric.startswith(("mean", "best", "maj")) and f"@{most}" in metric
                tags[f"val-{'core' if is_core else 'aux'}/{source}/{variable}/{metric}"] = value
    return tags


def numbers_drawn(num_samples: int) -> list[int]:
    """The n of best@n, worst@n, maj@n: 2, 4, 8, ... below `num_samples`, and `num_samples`; none for one sample."""
    if num_samples < 2:
        return []
    return [2**k for k in range(1, num_samples.bit_length()) if 2**k < num_samples] + [num_samples]


@lru_cache(maxsize=32)
def bootstrap_draws(num_samples: int, n: int) -> np.ndarray:
    """int64 (1000, n): samples drawn, with replacement, by numpy's legacy generator, whose stream never changes."""
    draws = np.random.RandomState(SEED).choice(num_samples, size=(NUM_BOOTSTRAP, n), replace=True)
    draws.flags.writeable = False
    return draws


@dataclass(frozen=True)
class Block:
    """Variables and prompts that can be computed together: the same variables, with equally many values."""

    names: tuple[str, ...]
    values: np.ndarray  # float64 (variables, prompts, N)
    votes: np.ndarray | None  # int64 (prompts, N): equal where preds are equal; None: there are no preds

    def metrics(self) -> dict[str, np.ndarray]:
        """Metric -> float64 (variables, prompts)."""
        num_samples = self.values.shape[2]
        found = {f"mean@{num_samples}": self.values.mean(axis=2)}
        if num_samples > 1:
            found[f"std@{num_samples}"] = self.values.std(axis=2)
        for n in numbers_drawn(num_samples):
            draws = bootstrap_draws(num_samples, n)
            parts = [self._bootstrap(chunk, draws) for chunk in self._chunks()]
            found |= {f"{name.format(n)}": np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}
        return found

    def _chunks(self) -> Iterator[slice]:
        num_variables, num_prompts, num_samples = self.values.shape
        per_prompt = NUM_BOOTSTRAP * max(num_variables, num_samples if self.votes is not None else 1)
        size = max(1, CHUNK // per_prompt)
        return (slice(start, start + size) for start in range(0, num_prompts, size))

    def _bootstrap(self, prompts: slice, draws: np.ndarray) -> dict[str, np.ndarray]:
        values = self.values[:, prompts]
        # Sample first, so that a draw copies whole rows: (N, variables, prompts) -> (1000, variables, prompts).
        by_sample = np.ascontiguousarray(np.moveaxis(values, 2, 0))
        best = by_sample[draws[:, 0]]
        worst = best.copy()
        for column in draws.T[1:]:
            drawn = by_sample[column]
            np.maximum(best, drawn, out=best)
            np.minimum(worst, drawn, out=worst)
        results = {"best": best, "worst": worst}
        if self.votes is not None:
            winners = majority(self.votes[prompts], draws)
            picked = np.take_along_axis(values, winners[None], axis=2)  # (variables, prompts, 1000)
            results["maj"] = np.moveaxis(picked, 2, 0)
        metrics = {}
        for name, result in results.items():
            metrics[f"{name}@{{}}/mean"] = result.mean(axis=0)
            metrics[f"{name}@{{}}/std"] = result.std(axis=0)
        return metrics


def majority(votes: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """int64 (prompts, 1000): in each draw, the first drawn sample of those with the commonest vote.

    Of several commonest votes the one that was drawn first wins.

    Args:
        votes: int64 (prompts, N), equal where samples agree.
        draws: int64 (1000, n).
    """
    num_samples, n = votes.shape[1], draws.shape[1]
    times = np.zeros((len(draws), num_samples))  # a sample was drawn
    first = np.full((len(draws), num_samples), n)  # and when, at first
    draw = np.arange(len(draws))
    for place in range(n - 1, -1, -1):
        times[draw, draws[:, place]] += 1
        first[draw, draws[:, place]] = place
    agree = (votes[:, :, None] == votes[:, None, :]).astype(np.float64)
    rank = np.matmul(times, agree) * (n + 1) - first
    rank[:, times == 0] = -1
    return rank.argmax(axis=2)


def _blocks(prompts: Sequence[Sequence[int]], variables: Variables) -> Iterator[Block]:
    """Blocks of the samples of one data source, given as rows per prompt."""
    acc = variables.get("acc")
    any_acc = acc is not None and any(acc[row] is not None for rows in prompts for row in rows)
    alike: dict[tuple[tuple[str, ...], int, bool], list[tuple[list[list[float]], list[int]]]] = defaultdict(list)
    for rows in prompts:
        of_prompt = _values_of_prompt(rows, variables, any_acc)
        groups: dict[tuple[int, bool], list[str]] = defaultdict(list)
        for name, (numbers, preds) in of_prompt.items():
            groups[len(numbers), preds is not None].append(name)
        for (count, voted), names in groups.items():
            known: dict[Value, int] = {}
            votes = [known.setdefault(pred, len(known)) for pred in of_prompt[names[0]][1] or ()]
            alike[tuple(names), count, voted].append(([of_prompt[name][0] for name in names], votes))
    for (of_block, _, voted), of_prompts in alike.items():
        values, all_votes = zip(*of_prompts, strict=True)
        array = np.array(values, np.float64).transpose(1, 0, 2)
        yield Block(of_block, array, np.array(all_votes, np.int64) if voted else None)


def _values_of_prompt(
    rows: Sequence[int], variables: Variables, any_acc: bool
) -> dict[str, tuple[list[float], list[Value] | None]]:
    """Variable -> (its numbers, their preds or None); variables without values, or with text, are left out."""
    numbers = {}
    for name, column in variables.items():
        scored = [row for row in rows if column[row] is not None]
        values: list[Any] = [column[row] for row in scored]
        if name == "acc" and any_acc:
            if scored:
                numbers["acc_success_only"] = list(map(float, values)), _preds(scored, variables, len(scored))
            values += [0.0] * (len(rows) - len(scored))
        if values and not any(isinstance(value, str) for value in values):
            numbers[name] = list(map(float, values)), _preds(rows, variables, len(values))
    return numbers


def _preds(rows: Sequence[int], variables: Variables, count: int) -> list[Value] | None:
    """The preds of these rows, or None unless there are `count` of them."""
    column = variables.get("pred")
    if column is None or len(rows) != count or any(column[row] is None for row in rows):
        return None
    return [column[row] for row in rows]


log = logging.getLogger(__name__)


@dataclass
class Validator:
    """Samples and scores the validation prompts. Runs on rank 0. Every validation uses the same random numbers, so a
    difference comes from the model.

    num_prompts: use only the first ones. num_shown: samples of each way in the table. folder: where every sample is
    written as `<step>.jsonl`. results: where the results of each prompt are added.
    """

    controller: Controller
    config: Config
    inputs: Inputs
    ways: Sequence[ValKwargs]
    num_prompts: int | None = None
    num_shown: int = 0
    folder: Path | None = None
    results: ProblemResults | None = None

    def __post_init__(self) -> None:
        self.prompts = prompts = self.inputs.prompts["val"]
        self.ways = sorted(self.ways, key=lambda way: way.n)
        self.rows = np.arange(min(self.num_prompts or len(prompts), len(prompts)), dtype=np.int64)
        self.sources = np.array([source or "unknown" for source in prompts.source_of_rows()], object)[self.rows]
        shown = self.rows.tolist() if self.num_shown else []
        texts = [prompts.prompt_text(row, skip_special_tokens=True) for row in shown]
        self.text_rank = np.unique(np.array(texts, object), return_inverse=True)[1]

    @classmethod
    def of_job(
        cls,
        controller: Controller,
        config: Config,
        inputs: Inputs,
        folder: Path,
        results: ProblemResults | None = None,
    ) -> Validator:
        """The validation of the job's template; `folder` is where validation_data_dir is."""
        generations = config.trainer.validation_data_dir
        return cls(
            *(controller, config, inputs, config.rollout.val_kwargs),
            num_shown=config.trainer.log_val_generations,
            folder=folder / generations if generations else None,
            results=results,
        )

    def run(self, step: int) -> tuple[dict[str, float], str]:
        """Metrics, and Markdown tables of some samples.

        Metrics are those of `validation_metrics`. If two ways of sampling have the same metric, such as worst@2, that
        of the way with fewer samples is used.
        """
        metrics: dict[str, float] = {}
        failures: dict[str, float] = defaultdict(float)
        written: list[dict[str, Any]] = []
        tables = []
        for way in self.ways:
            shown = shown_rows(self.text_rank, way.n, self.num_shown)
            batch = self._sample(way, shown)
            sources, uids = (np.repeat(column, way.n).tolist() for column in (self.sources, self.rows))
            batch.samples["acc"] = reported_acc(batch.samples, sources)
            if self.results is not None:
                self.results.add(batch.samples, sources, way_of(way))
            metrics_of_way = metric_tags(validation_metrics(sources, uids, variables_of(batch.samples)))
            metrics_of_way[f"val-aux/response_length/mean@{way.n}"] = float(batch.samples["response_length"].mean())
            if "num_turns" in batch.samples:
                turns = batch.samples["num_turns"]
                values = {"min": turns.min(), "max": turns.max(), "mean": turns.mean()}
                metrics_of_way |= {f"val-aux/num_turns/{name}": float(value) for name, value in values.items()}
            metrics |= {tag: value for tag, value in metrics_of_way.items() if tag not in metrics}
            for name, count in failed_scores(batch).items():
                failures[f"val-aux/{name}"] += count
            if shown:
                label = f"n = {way.n}, temperature {temperature_of(way):g}"
                tables.append(f"{label}\n\n{generations_table(self._generations(batch, shown, way, step))}")
            if self.folder is not None:
                written += self._generations(batch, range(len(batch)), way, step)
        if self.folder is not None:
            run_owner.check()
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
        index = np.tile(np.arange(n, dtype=np.int64), len(self.rows))
        samples = {"row": rows, "epoch": np.zeros(len(rows), np.int64), "sample_index": index, "show": show}
        batch = DataProto({}, samples, {"split": "val", "step": 0})
        longest, temperature = self.config.data.max_response_length, temperature_of(way)
        sampling = SamplingParams(
            longest, temperature, top_k=way.top_k, top_p=way.top_p, eos_token_ids=end_token_ids(self.inputs.tokenizer)
        )
        batch = batch.union(self.controller["rollout"].generate(batch, sampling).get())
        return score(self.controller, batch, self.config.reward)

    def _generations(self, batch: DataProto, rows: Sequence[int], way: ValKwargs, step: int) -> list[dict[str, Any]]:
        """Samples with the keys of verl's dumps, and `n`, the samples per prompt of the way they were drawn."""
        samples = batch.samples
        generations = []
        for row in rows:
            prompt, score, acc = int(samples["row"][row]), float(samples["score"][row]), float(samples["acc"][row])
            generations.append(
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
        return generations


def temperature_of(way: ValKwargs) -> float:
    return 0.0 if way.do_sample is False else way.temperature


def way_of(way: ValKwargs) -> Way:
    """The way of sampling, equal for settings that draw the same tokens."""
    temperature = temperature_of(way)
    return Way(way.n, temperature, way.top_k, way.top_p) if temperature else Way(way.n, 0.0, -1, 1.0)


def shown_rows(text_rank: np.ndarray, n: int, count: int) -> list[int]:
    """Samples in the table, of n samples of each prompt, as in verl: the first `count` of all samples, sorted by prompt
    text (`text_rank`: each prompt's position in that order) and then shuffled with a fixed seed."""
    order = np.argsort(np.repeat(text_rank, n), kind="stable").tolist()
    np.random.RandomState(SEED).shuffle(order)
    return order[:count]


def reported_acc(samples: Mapping[str, np.ndarray], sources: Sequence[str]) -> np.ndarray:
    """float32 (N,): `acc` of the data sources whose scorer returns one, NaN for the others."""
    given = {source for source, extra in zip(sources, samples["extras"], strict=True) if has_acc(extra)}
    return np.where([source in given for source in sources], samples["acc"], np.float32(np.nan))


def variables_of(samples: Mapping[str, np.ndarray]) -> Variables:
    """Variables for metrics: `reward`, `acc`, and everything else that the scorer returned; None where it did not."""
    extras = samples["extras"].tolist()
    names = dict.fromkeys(name for extra in extras for name in extra if name not in ("reward", "acc"))
    return {
        "reward": samples["score"].tolist(),
        "acc": [None if np.isnan(acc) else acc for acc in samples["acc"].tolist()],
        **{name: [extra.get(name) for extra in extras] for name in names},
    }


class TrainValidation(Validation):
    """Samples of the validation prompts, with the engine of the rollouts."""

    validator: Validator | None = None  # if there are validation prompts

    def set_up(self, run: Run) -> None:
        if "val" in self.job.inputs.prompts:
            self.validator = Validator.of_job(run.controller, self.job.config, self.job.inputs, run.folder)

    @property
    def first(self) -> bool:  # type: ignore[override]
        return self.job.config.trainer.val_before_train and self.validator is not None

    @property
    def freq(self) -> int:
        return self.job.config.trainer.test_freq if self.validator is not None else -1

    def run(self, run: Run, step: int) -> tuple[dict[str, float], str]:
        assert self.validator is not None
        with self.job.rollouts.paused(step):
            return self.validator.run(step)
