"""Curricula: samplers that choose prompts by the results of earlier steps."""

from __future__ import annotations

import base64
import inspect
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpcrl.algorithms.parameters import NoParameters, param
from hpcrl.config.plugins import sampler_parameters
from hpcrl.runtime.exits import InputError, folded
from hpcrl.runtime.user_code import import_file

if TYPE_CHECKING:
    from hpcrl.config.schema import DataConfig
    from hpcrl.data.prompts import PromptDataset


@dataclass(frozen=True, eq=False)
class StepReport:
    """Results of a step for its prompts; each array has one entry per prompt."""

    step: int  # from 1
    rows: np.ndarray  # int64, row in the dataset
    epochs: np.ndarray  # int64, number of earlier draws of the row
    mean_score: np.ndarray  # float64, over the prompt's samples; a failed score is 0
    std_score: np.ndarray  # float64, population
    mean_acc: np.ndarray  # float64, of the scorer's acc, else its score, where scoring did not fail; NaN if all failed
    mean_response_length: np.ndarray  # float64, in tokens


def step_report(step: int, samples: Mapping[str, np.ndarray]) -> StepReport:
    """Return the report of a batch from its sample columns `row, epoch, prompt, score, acc, response_length`.

    `prompt` identifies the groups; prompts are reported in its order.
    """
    _, first, group, counts = np.unique(samples["prompt"], return_index=True, return_inverse=True, return_counts=True)

    def mean(values: np.ndarray, divisor: np.ndarray = counts) -> np.ndarray:
        return np.bincount(group, values, len(counts)) / divisor

    score, acc = (samples[name].astype(np.float64) for name in ("score", "acc"))
    mean_score = mean(score)
    has_acc = ~np.isnan(acc)
    with np.errstate(invalid="ignore"):
        mean_acc = mean(np.where(has_acc, acc, 0.0), np.bincount(group, has_acc, len(counts)))
    return StepReport(
        step=step,
        rows=samples["row"][first].astype(np.int64),
        epochs=samples["epoch"][first].astype(np.int64),
        mean_score=mean_score,
        std_score=np.sqrt(mean((score - mean_score[group]) ** 2)),
        mean_acc=mean_acc,
        mean_response_length=mean(samples["response_length"]),
    )


class AbstractCurriculumSampler(ABC):
    """Base class of user samplers: `data.sampler: {class_path: my_sampler.py, class_name: MySampler}`.

    There is one object, on rank 0, for the whole run. Everything that `choose` depends on must be in `state_dict`, and
    random numbers must be keyed by `seed` and by that state, so that a resumed run draws the same prompts as an
    uninterrupted one.

    `Parameters`, a frozen dataclass (see `hpcrl.algorithms.parameters`), declares the keys
    `data.sampler.<class>.<field>`; `self.params` is an instance of it.
    """

    Parameters: ClassVar[type] = NoParameters

    def __init__(self, data_source: PromptDataset, data_config: DataConfig, seed: int) -> None:
        self.data_source = data_source
        self.data_config = data_config
        self.seed = seed
        self.params: Any = sampler_parameters(data_config.sampler, self.Parameters)

    @abstractmethod
    def choose(self, n: int) -> np.ndarray:
        """Return the next n prompts: int (n,), rows of `data_source`; rows may repeat."""

    def update(self, report: StepReport) -> None:  # noqa: B027
        """Called after each step with its results."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values; see `pack`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore a state from `state_dict`."""


class Curriculum:
    """A curriculum with the `Sampler` interface: rows are checked, and epochs count the earlier draws of each row."""

    def __init__(self, chooser: AbstractCurriculumSampler, num_rows: int) -> None:
        self.chooser = chooser
        self.name = type(chooser).__name__
        self.draws = np.zeros(num_rows, dtype=np.int32)

    def next_rows(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self._checked(np.asarray(self.chooser.choose(n)), n)
        # A row drawn twice in one call is two prompts, with different epochs.
        order = np.argsort(rows, kind="stable")
        _, starts, counts = np.unique(rows[order], return_index=True, return_counts=True)
        earlier = np.empty(n, np.int64)
        earlier[order] = np.arange(n) - np.repeat(starts, counts)
        epochs = self.draws[rows] + earlier
        np.add.at(self.draws, rows, 1)
        return rows, epochs

    def rows_ahead(self, n: int) -> np.ndarray:
        """Return no rows: the next ones depend on the results of this step."""
        return np.zeros(0, np.int64)

    def update(self, report: StepReport) -> None:
        self.chooser.update(report)

    def state_dict(self) -> dict[str, Any]:
        return {"sampler": self.name, "draws": pack(self.draws), "chooser": self.chooser.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("sampler") != self.name:
            raise InputError(
                f"the checkpoint holds the state of data.sampler {state.get('sampler', '(built-in order)')}, but the "
                f"config has {self.name}; resume with the checkpoint's sampler, or use another run.name"
            )
        draws = unpack(state["draws"], np.int32)
        if len(draws) != len(self.draws):
            raise InputError(
                f"the checkpoint's sampler has drawn from {len(draws)} prompts, but data.train_files have "
                f"{len(self.draws)}; resume with the same files and filter, or use another run.name"
            )
        self.draws = draws
        self.chooser.load_state_dict(state["chooser"])

    def _checked(self, rows: np.ndarray, n: int) -> np.ndarray:
        where = f"data.sampler {self.name}.choose({n})"
        if rows.shape != (n,) or rows.dtype.kind not in "iu":
            raise InputError(f"{where} returned {rows.dtype} of shape {rows.shape}; expected {n} whole numbers")
        wrong = (rows < 0) | (rows >= len(self.draws))
        if wrong.any():
            raise InputError(f"{where} returned row {rows[wrong][0]}; expected rows from 0 to {len(self.draws) - 1}")
        return rows.astype(np.int64)


class WeightedCurriculum(AbstractCurriculumSampler):
    """Draws prompts by `weights`, without replacement in one draw of at most as many as have a weight above 0."""

    topic: ClassVar[str]  # of the random numbers
    arrays: ClassVar[Mapping[str, type[np.generic]]] = {}  # attributes with the state of a subclass, and their dtypes

    def __init__(self, data_source: PromptDataset, data_config: DataConfig, seed: int) -> None:
        super().__init__(data_source, data_config, seed)
        self.num_draws = 0

    @abstractmethod
    def weights(self) -> np.ndarray:
        """Return float64 (rows,), not all 0."""

    def choose(self, n: int) -> np.ndarray:
        weights = self.weights()
        most = int(np.count_nonzero(weights))
        rows: list[np.ndarray] = []
        left = n
        while left > 0:
            # Efraimidis and Spirakis (2006): the k largest u^(1/w) are a weighted draw without replacement.
            with np.errstate(divide="ignore"):
                order = np.argsort(-np.log(self._uniform(len(weights))) / weights, kind="stable")
            rows.append(order[: min(left, most)])
            left -= len(rows[-1])
        return np.concatenate(rows)

    def state_dict(self) -> dict[str, Any]:
        return {**{name: pack(getattr(self, name)) for name in self.arrays}, "num_draws": self.num_draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_draws = state["num_draws"]
        for name, dtype in self.arrays.items():
            setattr(self, name, unpack(state[name], dtype))

    def _uniform(self, count: int) -> np.ndarray:
        """Return float64 (count,) in (0, 1), different at each call and the same in every run of this seed."""
        name = f"{self.topic} {self.seed} {self.num_draws}"
        self.num_draws += 1
        key = int.from_bytes(blake2b(name.encode(), digest_size=16).digest(), "little")
        return ((np.random.Philox(key=key).random_raw(count) >> np.uint64(12)) + 0.5) * 2.0**-52


class DifficultyCurriculum(WeightedCurriculum):
    """Prefers prompts that are solved about half of the time, where a group's rewards vary most.

    A prompt is drawn with a weight of 4 p (1 - p), at least 0.05: p is a moving average of its accuracy (without one:
    its score), clipped to [0, 1], and 1/2 for a prompt that was never scored.
    """

    topic = "difficulty curriculum"
    arrays = {"solved": np.float32}
    FLOOR = 0.05
    NEW = 0.5  # weight of the newest step in the average

    def __init__(self, data_source: PromptDataset, data_config: DataConfig, seed: int) -> None:
        super().__init__(data_source, data_config, seed)
        self.solved = np.full(len(data_source), np.nan, np.float32)

    def weights(self) -> np.ndarray:
        solved = np.nan_to_num(self.solved.astype(np.float64), nan=0.5)
        return np.maximum(4 * solved * (1 - solved), self.FLOOR)

    def update(self, report: StepReport) -> None:
        scored = ~np.isnan(report.mean_acc)
        for row, value in zip(report.rows[scored].tolist(), report.mean_acc[scored].clip(0, 1).tolist(), strict=True):
            before = self.solved[row]
            self.solved[row] = value if np.isnan(before) else (1 - self.NEW) * before + self.NEW * value


class LevelCurriculum(WeightedCurriculum):
    """Begins with the lowest `extra_info.level` of each data source, and adds its next level when the accuracy in the
    highest one so far, a moving average over steps, reaches `raise_at`. Rows without a level have level 0.
    """

    @dataclass(frozen=True)
    class Parameters:
        raise_at: float = param(0.8, gt=0, le=1, help="LevelCurriculum: accuracy from which the next level is drawn")

    topic = "level curriculum"
    arrays = {"highest": np.int64, "average": np.float64}
    NEW = 0.5  # weight of the newest step in the average

    def __init__(self, data_source: PromptDataset, data_config: DataConfig, seed: int) -> None:
        super().__init__(data_source, data_config, seed)
        self.sources, self.source = np.unique(data_source.source_of_rows(), return_inverse=True)
        self.level = np.array([level_of(info or {}) for info in data_source.values("extra_info")], np.int64)
        self.highest = np.array([self.level[self.source == it].min() for it in range(len(self.sources))])
        self.average = np.full(len(self.sources), np.nan)

    def weights(self) -> np.ndarray:
        return (self.level <= self.highest[self.source]).astype(np.float64)

    def update(self, report: StepReport) -> None:
        newest = (self.level[report.rows] == self.highest[self.source[report.rows]]) & ~np.isnan(report.mean_acc)
        for source in np.unique(self.source[report.rows[newest]]).tolist():
            value = report.mean_acc[newest & (self.source[report.rows] == source)].mean()
            before = self.average[source]
            self.average[source] = value if np.isnan(before) else (1 - self.NEW) * before + self.NEW * value
            above = self.level[(self.source == source) & (self.level > self.highest[source])]
            if len(above) and self.average[source] >= self.params.raise_at:
                self.highest[source], self.average[source] = above.min(), np.nan


def level_of(extra_info: Mapping[str, Any]) -> int:
    """The number in `level`, which may be text such as "Level 3"; 0 if there is none."""
    match = re.search(r"-?\d+", str(extra_info.get("level")))
    return int(match[0]) if match else 0


BUILT_IN: dict[str, type[AbstractCurriculumSampler]] = {
    "DifficultyCurriculum": DifficultyCurriculum,
    "LevelCurriculum": LevelCurriculum,
}


def load_class(path: str | None, name: str) -> type[AbstractCurriculumSampler]:
    """The class `name` of a Python file, or a built-in one where there is no file (InputError)."""
    where = f"data.sampler: {path or ''}"
    if path is None:
        if name not in BUILT_IN:
            raise InputError(
                f"data.sampler.class_name={name} is not a built-in sampler; use {', '.join(BUILT_IN)}, "
                "or set data.sampler.class_path"
            )
        return BUILT_IN[name]
    try:
        module = import_file(path)
    except Exception as error:  # the file is the user's
        raise InputError(
            f"{where}: {type(error).__name__}: {folded(error)}; expected a Python file with a class {name!r}"
        ) from error
    sampler = getattr(module, name, None)
    if not (inspect.isclass(sampler) and issubclass(sampler, AbstractCurriculumSampler)) or inspect.isabstract(sampler):
        raise InputError(
            f"{where}: {name!r} is {'missing' if sampler is None else repr(sampler)}; expected a subclass of "
            "hpcrl.data.curriculum.AbstractCurriculumSampler with a method choose(n)"
        )
    return sampler


def pack(array: np.ndarray) -> str:
    """Encode an array as a short JSON string."""
    return base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes())).decode()


def unpack(text: str, dtype: type[np.generic]) -> np.ndarray:
    """Decode a one-dimensional array of this dtype from `pack`."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype).copy()
