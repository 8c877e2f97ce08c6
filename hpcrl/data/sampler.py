"""Which training prompts come next, and where a resumed run goes on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hpcrl.data.curriculum import Curriculum, StepReport, load_class
from hpcrl.data.order import rows_at, weight_quotas, weighted_rows_at
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from hpcrl.config.schema import DataConfig
    from hpcrl.data.prompts import PromptDataset

log = logging.getLogger(__name__)


class Sampler(Protocol):
    """Prompts one after the other. Draws may be of any size: what comes depends on how many were drawn before."""

    def next_rows(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """The next n prompts: (rows, epochs), both int64 (n,). No pair of row and epoch comes twice in a run."""
        ...

    def update(self, report: StepReport) -> None:
        """Takes what a step has found out about its prompts."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What JSON can hold: with it, another sampler goes on at the next prompt."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class OrderedSampler:
    """All rows in each epoch, in an order keyed by (seed, epoch); the position is the whole state."""

    def __init__(self, num_rows: int, seed: int, shuffle: bool) -> None:
        self.num_rows = num_rows
        self.seed = seed
        self.shuffle = shuffle
        self.position = 0

    def next_rows(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        return self._rows_at(self._advance(n))

    def update(self, report: StepReport) -> None:
        """The order does not depend on what a step finds out."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": self._order()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "position" not in state:
            raise InputError(
                f"the checkpoint holds the state of data.sampler {state.get('sampler')}, and the config asks for the "
                "built-in order; resume with the sampler of the checkpoint, or choose another run.name"
            )
        self.position = int(state["position"])
        if state.get("order", self._order()) != self._order():
            log.warning(
                "the order of the training prompts is another than that of the checkpoint (%s, was %s): some prompts "
                "may come a second time in their epoch",
                *(self._order(), state["order"]),
            )

    def _order(self) -> dict[str, Any]:
        """What a position means depends on."""
        return {"rows": self.num_rows, "seed": self.seed, "shuffle": self.shuffle}

    def _advance(self, n: int) -> np.ndarray:
        positions = np.arange(self.position, self.position + n, dtype=np.int64)
        self.position += n
        return positions

    def _rows_at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return rows_at(positions, self.num_rows, self.seed, self.shuffle)


class WeightedFiles(OrderedSampler):
    """Files drawn in the proportion of their weights, each in epochs of its own.

    Weights whose ratio is one of whole numbers with a sum up to 10,000 are exact, others are rounded to 1/10,000 of
    the whole. After any number of draws each file's share is off by a few prompts at most, and a small file starts its
    next epoch while a large one is in its first.
    """

    def __init__(self, files: Sequence[str], sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool):
        super().__init__(sum(sizes), seed, shuffle)
        self.sizes = list(sizes)
        if len(weights) != len(sizes):
            raise InputError(
                f"data.train_weights={list(weights)} has {len(weights)} weights for {len(sizes)} data.train_files; "
                "give one for each file"
            )
        self.quotas = weight_quotas(weights)
        for file, size, weight, quota in zip(files, sizes, weights, self.quotas, strict=True):
            if size == 0:
                raise InputError(
                    f"{file}: no prompt is left to draw after the filter and data.train_max_samples; expected at least "
                    f"one for its weight of {weight:g}; take the file and its weight out"
                )
            if quota == 0:
                raise InputError(
                    f"{file}: its weight of {weight:g} is less than 1/10000 of the sum of data.train_weights; "
                    "raise it, or take the file out"
                )

    def _order(self) -> dict[str, Any]:
        return {**super()._order(), "sizes": self.sizes, "quotas": list(map(int, self.quotas))}

    def _rows_at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return weighted_rows_at(positions, self.sizes, self.quotas, self.seed, self.shuffle)


def make_sampler(dataset: PromptDataset, config: DataConfig, seed: int) -> Sampler:
    """The sampler that data.sampler and data.train_weights ask for."""
    chosen = config.sampler
    if chosen.class_name is None:
        if chosen.class_path is not None:
            raise InputError(
                f"data.sampler.class_path={chosen.class_path} without data.sampler.class_name; name the class in it"
            )
        if config.train_weights is None:
            return OrderedSampler(len(dataset), seed, config.shuffle)
        return WeightedFiles(config.train_files, dataset.file_sizes, config.train_weights, seed, config.shuffle)
    if config.train_weights is not None:
        raise InputError(
            f"data.train_weights={config.train_weights} and data.sampler.class_name={chosen.class_name} both say what "
            "is drawn; use one of them"
        )
    chooser = load_class(chosen.class_path, chosen.class_name)
    return Curriculum(chooser(data_source=dataset, data_config=config, seed=seed), len(dataset))
