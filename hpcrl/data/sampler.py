"""Order of the training prompts, and samplers that can be resumed.

The built-in order is stateless: the row at a position is a function of (rows, seed, position) only. Positions count the
prompts drawn since the start of the run, from 0.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from math import gcd, lcm
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from hpcrl.data.curriculum import Curriculum, StepReport, load_class
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from hpcrl.config.schema import DataConfig
    from hpcrl.data.prompts import PromptDataset


WEIGHT_UNITS = 10_000  # largest cycle of weighted files, in draws


@lru_cache(maxsize=16)
def epoch_permutation(num_rows: int, seed: int, epoch: int, shuffle: bool, file: int | None = None) -> np.ndarray:
    """Return the order of the rows in one epoch: int64 (num_rows,), read-only; the identity if not `shuffle`.

    Args:
        file: key of a file with its own epochs.
    """
    if shuffle:
        # Sorted raw Philox words: numpy guarantees their stability, but not that of `Generator.permutation`.
        name = f"data order {seed} {epoch}" + ("" if file is None else f" file {file}")
        key = int.from_bytes(blake2b(name.encode(), digest_size=16).digest(), "little")
        order = np.argsort(np.random.Philox(key=key).random_raw(num_rows), kind="stable").astype(np.int64)
    else:
        order = np.arange(num_rows, dtype=np.int64)
    order.flags.writeable = False
    return order


def rows_at(
    positions: np.ndarray, num_rows: int, seed: int, shuffle: bool, file: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows, epochs) at `positions` (int64, increasing) of all epochs laid end to end, both int64."""
    epochs, places = np.divmod(positions, num_rows)
    rows = np.empty(len(positions), dtype=np.int64)
    for epoch in np.unique(epochs).tolist():
        of_file = epochs == epoch
        rows[of_file] = epoch_permutation(num_rows, seed, epoch, shuffle, file)[places[of_file]]
    return rows, epochs


def weight_quotas(weights: Sequence[float]) -> list[int]:
    """Return the weights, all above 0, as whole numbers in the same proportion with a sum of at most 10,000.

    If there are none that small: the largest-remainder shares of 10,000, and 0 for a weight without a share.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    quotas = [int(weight * scale) for weight in exact]
    if sum(quotas) // gcd(*quotas) > WEIGHT_UNITS:
        shares = [WEIGHT_UNITS * weight / sum(exact) for weight in exact]
        quotas = [int(share) for share in shares]
        by_remainder = sorted(range(len(shares)), key=lambda i: quotas[i] - shares[i])
        for i in by_remainder[: WEIGHT_UNITS - sum(quotas)]:
            quotas[i] += 1
    common = gcd(*quotas)
    return [quota // common for quota in quotas]


@lru_cache(maxsize=4)
def file_cycle(quotas: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return one cycle of files in which file f appears quotas[f] times, spread as evenly as possible.

    Webster's method: the j-th draw of a file belongs at (j + 1/2) / quota of the cycle. Returns (files, before), both
    int64 (sum(quotas),): the file at each place, and how often it appeared at earlier places.
    """
    files = np.repeat(np.arange(len(quotas), dtype=np.int64), quotas)
    before = np.concatenate([np.arange(quota, dtype=np.int64) for quota in quotas])
    order = np.argsort((before + 0.5) / np.asarray(quotas)[files], kind="stable")
    return files[order], before[order]


def weighted_rows_at(
    positions: np.ndarray, file_sizes: Sequence[int], quotas: Sequence[int], seed: int, shuffle: bool
) -> tuple[np.ndarray, np.ndarray]:
    """As `rows_at`, with files drawn in the proportion of `quotas`; epochs count the passes over a row's file.

    Rows are numbered over all files laid end to end; `file_sizes` are rows per file.
    """
    in_cycle, before = file_cycle(tuple(quotas))
    cycles, places = np.divmod(positions, len(in_cycle))
    files = in_cycle[places]
    drawn = cycles * np.asarray(quotas, np.int64)[files] + before[places]
    starts = np.cumsum([0, *file_sizes])
    rows, epochs = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
    for file in np.unique(files).tolist():
        of_file = files == file
        rows[of_file], epochs[of_file] = rows_at(drawn[of_file], file_sizes[file], seed, shuffle, file)
        rows[of_file] += starts[file]
    return rows, epochs


def steps_for_epochs(num_rows: int, batch_size: int, epochs: int, *, steps_done: int = 0, rows_done: int = 0) -> int:
    """Return the steps of `epochs` passes over the rows, without an incomplete last batch; at least one.

    The steps done took `rows_done` of the rows, in batches of any size; the others have this size.
    """
    return max(1, steps_done + (num_rows * epochs - rows_done) // batch_size)


log = logging.getLogger(__name__)


class OrderedSampler:
    """All rows in each epoch, in an order keyed by (seed, epoch); the state is the position.

    Draws may be of any size: the next prompts depend only on how many were drawn before.
    """

    def __init__(self, num_rows: int, seed: int, shuffle: bool) -> None:
        self.num_rows = num_rows
        self.seed = seed
        self.shuffle = shuffle
        self.position = 0

    def next_rows(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the next n prompts: (rows, epochs), both int64 (n,). No pair of row and epoch repeats in a run."""
        return self._rows_at(self._advance(n))

    def rows_ahead(self, n: int) -> np.ndarray:
        """Return the rows of the n prompts that come next, int64 (n,), without drawing them."""
        return self._rows_at(np.arange(self.position, self.position + n, dtype=np.int64))[0]

    def update(self, report: StepReport) -> None:
        """Ignored: the order does not depend on results."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values; a sampler that loads it continues at the next prompt."""
        return {"position": self.position, "order": self._order()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "position" not in state:
            raise InputError(
                f"the checkpoint holds the state of data.sampler {state.get('sampler')}, but the config has the "
                "built-in order; resume with the checkpoint's sampler, or use another run.name"
            )
        self.position = int(state["position"])
        if state.get("order", self._order()) != self._order():
            log.warning(
                "the order of the training rows differs from the checkpoint's (%s, was %s): some may repeat within an "
                "epoch",
                *(self._order(), state["order"]),
            )

    def _order(self) -> dict[str, Any]:
        """The parameters that define the order."""
        return {"rows": self.num_rows, "seed": self.seed, "shuffle": self.shuffle}

    def _advance(self, n: int) -> np.ndarray:
        positions = np.arange(self.position, self.position + n, dtype=np.int64)
        self.position += n
        return positions

    def _rows_at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return rows_at(positions, self.num_rows, self.seed, self.shuffle)


class WeightedFiles(OrderedSampler):
    """Files drawn in proportion to their weights, each with its own epochs.

    Weights whose ratio is one of whole numbers with a sum up to 10,000 are exact, others are rounded to 1/10,000 of the
    total. After any number of draws each file's share is off by a few prompts at most, and a small file starts its next
    epoch while a large one is in its first.
    """

    def __init__(self, files: Sequence[str], sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool):
        super().__init__(sum(sizes), seed, shuffle)
        self.sizes = list(sizes)
        if len(weights) != len(sizes):
            raise InputError(
                f"data.train_weights={list(weights)} has {len(weights)} weights for {len(sizes)} data.train_files; "
                "set one per file"
            )
        self.quotas = weight_quotas(weights)
        for file, size, weight, quota in zip(files, sizes, weights, self.quotas, strict=True):
            if size == 0:
                raise InputError(
                    f"{file}: no prompt is left to draw after the filter and data.train_max_samples; expected at least "
                    f"one for its weight of {weight:g}; remove the file and its weight"
                )
            if quota == 0:
                raise InputError(
                    f"{file}: its weight of {weight:g} is less than 1/10000 of the sum of data.train_weights; "
                    "raise it, or remove the file"
                )

    def _order(self) -> dict[str, Any]:
        return {**super()._order(), "sizes": self.sizes, "quotas": list(map(int, self.quotas))}

    def _rows_at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return weighted_rows_at(positions, self.sizes, self.quotas, self.seed, self.shuffle)


Sampler: TypeAlias = OrderedSampler | Curriculum


def make_sampler(dataset: PromptDataset, config: DataConfig, seed: int) -> Sampler:
    """Make the sampler of data.sampler and data.train_weights."""
    chosen = config.sampler
    if chosen.class_name is None:
        if chosen.class_path is not None:
            raise InputError(
                f"data.sampler.class_path={chosen.class_path} without data.sampler.class_name; set class_name"
            )
        return file_order(dataset.file_sizes, config, seed)
    if config.train_weights is not None:
        raise InputError(
            f"data.train_weights={config.train_weights} and data.sampler.class_name={chosen.class_name} exclude each "
            "other; use one of them"
        )
    chooser = load_class(chosen.class_path, chosen.class_name)
    return Curriculum(chooser(data_source=dataset, data_config=config, seed=seed), len(dataset))


def file_order(file_sizes: Sequence[int], config: DataConfig, seed: int) -> OrderedSampler:
    """The built-in order of the rows of data.train_files, with data.train_weights."""
    if config.train_weights is None:
        return OrderedSampler(sum(file_sizes), seed, config.shuffle)
    return WeightedFiles(config.train_files, file_sizes, config.train_weights, seed, config.shuffle)
