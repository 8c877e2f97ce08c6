"""Generation that never stops: finished prompts are trained as they come, within a bound on their staleness."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcrl.batch.data_proto import DataProto
from hpcrl.controller.controller import replica_column
from hpcrl.data.curriculum import step_report
from hpcrl.run.rollouts.scoring import num_prompts, numbered, score
from hpcrl.run.rollouts.source import Gathering, RolloutContext, RolloutSource, RolloutState
from hpcrl.workers.response_columns import ROLLOUT_BUSY_S

if TYPE_CHECKING:
    from hpcrl.workers.response_stream import Finished

log = logging.getLogger(__name__)


class Prompt(NamedTuple):
    """A prompt whose samples are being drawn. version: of the engine's weights when it was submitted, or lower."""

    row: int
    epoch: int
    replica: int
    version: int


class Streaming(RolloutSource):
    """An update of the weights of version v never trains a sample whose first token is of a version before v - T, T
    being async_training.staleness_threshold: a prompt of version v is due at step v + 1 + T. B is train_batch_size.

    - While the engine has version v, prompts are submitted until (v + 1 + T) B have been, dropped ones aside.
    - Step k takes B prompts that are finished, the ones that are due first. For each step j from k on, it waits
      until it can take so many of those due by then that what is left of them fits into the steps k + 1 to j.

    So before step k at most (j - k + 1) B prompts are due by step j, and a step always finds room for what is due.
    With T = 0 each step waits for all that was submitted for it: that is synchronous.

    Prompts stay on the replica that they were submitted to. They are numbered in the order of their submission.
    """

    def __init__(self, context: RolloutContext) -> None:
        super().__init__(context)
        self.controller, self.config = context.controller, context.config
        rollout = self.controller["rollout"].layout
        self.replica_of = {leader: dp for dp, leader in enumerate(rollout.leaders)}
        self.num_open = Counter(dict.fromkeys(range(rollout.dp), 0))  # replica -> samples under way
        self.column = replica_column(rollout.dp)
        self.prompts: dict[int, Prompt] = {}  # number -> those that are submitted and not yet taken from their replica
        self.finished: set[int] = set()  # of these, those that a replica has reported
        self.again: deque[tuple[int, int]] = deque()  # (row, epoch) of those that were under way at the checkpoint
        self.num_submitted = 0  # prompts, dropped ones aside
        self.next_number = 0
        self.seen = Gathering()  # since the last step
        self.is_generating = False
        self.busy_seconds = 0.0  # of all replicas, since the last step
        self.controller.listener = self._on_finished

    def next(self, step: int) -> DataProto:
        if not self.is_generating:
            self._generate()
        filtering = self.config.algorithm.filter_groups.enable
        while self._has_to_wait(step, self._ready_versions()):
            finished = [self.prompts[number].version for number in self.finished]
            # All at once if that is enough; or what there is, so that others soon replace what is dropped.
            if finished and (filtering or not self._has_to_wait(step, self._ready_versions() + finished)):
                self._take(step)
            else:
                with self.context.timers("gen"):
                    self.controller.listen()
        batch = self.pool.complete(self._oldest(step))
        metrics = {ROLLOUT_BUSY_S: self.busy_seconds}
        metrics |= self.pool.metrics_of(step, batch, self.seen)
        self.busy_seconds, self.seen = 0.0, Gathering()
        return self.context.deliver((batch, metrics))

    def update_weights(self, step: int) -> None:
        self.context.wait()
        self.weights.update_to(step)
        self._generate()

    @contextmanager
    def paused(self, step: int) -> Iterator[None]:
        """Context for other use of the engine: any command that needs it interrupts generation."""
        yield
        self._generate()

    def save(self, folder: Path, step: int, kept: RolloutState) -> dict[str, Any]:
        """Save finished prompts, and list unfinished ones, which will be drawn again."""
        self._take(step)
        state = self.pool.save(folder, step, self.between_steps())
        under_way = [self.prompts[number] for number in sorted(self.prompts)]
        rows = [(prompt.row, prompt.epoch) for prompt in under_way] + list(self.again)
        return state | {"under_way": rows, "seen": [self.seen.num_generated, self.seen.num_evicted]}

    def load(self, state: dict[str, Any], folder: Path, step: int) -> None:
        self.pool.load(state, folder, step)
        self.again.extend((int(row), int(epoch)) for row, epoch in state.get("under_way", ()))
        self.seen.num_generated, self.seen.num_evicted = state.get("seen", (0, 0))
        self.num_submitted = step * self.config.data.train_batch_size
        if self.pool.surplus is not None:
            self.next_number = num_prompts(self.pool.surplus)  # `write` has numbered them anew
            self.num_submitted += self.next_number
            self._warn_of_overdue(step)

    def _warn_of_overdue(self, step: int) -> None:
        """Warn of prompts that were drawn under a larger bound or batch size, or in another mode."""
        versions, cfg = sorted(self._ready_versions()), self.config
        threshold, size = cfg.async_training.staleness_threshold, cfg.data.train_batch_size
        # The oldest come first: the place in the order says in which step.
        late = sum(version < step + place // size - threshold for place, version in enumerate(versions))
        if late:
            log.warning(
                "%d of the %d prompts that the checkpoint keeps will be older than "
                "async_training.staleness_threshold=%d when they are trained: they were drawn with another "
                "async_training or data.train_batch_size",
                *(late, len(versions), threshold),
            )

    def _generate(self) -> None:
        """Continue to generate, with the weights that the engine has."""
        assert self.weights.version is not None
        self.controller["rollout"].generate_until_interrupted(self.context.sampling, self.weights.version)
        self.is_generating = True
        self._submit()

    def _on_finished(self, rank: int, note: Finished) -> None:
        self.finished.update(note.groups)
        self.num_open[self.replica_of[rank]] -= len(note.groups) * self.config.rollout.n
        self.busy_seconds += note.busy_seconds
        self._submit()

    def _submit(self) -> None:
        """Submit prompts up to the bound, each to the replica with the fewest running samples."""
        n, size = self.config.rollout.n, self.config.data.train_batch_size
        assert self.weights.version is not None
        steps = min(self.weights.version + 1 + self.config.async_training.staleness_threshold, self.context.total_steps)
        replicas: list[int] = []
        while len(replicas) < steps * size - self.num_submitted:
            replica, num_open = min(self.num_open.items(), key=lambda item: (item[1], item[0]))
            if num_open > self.config.rollout.max_num_seqs:  # what waits there could start sooner elsewhere
                break
            self.num_open[replica] += n
            replicas.append(replica)
        if not replicas:
            return
        numbers = range(self.next_number, self.next_number + len(replicas))
        self.next_number, self.num_submitted = numbers.stop, self.num_submitted + len(replicas)
        for number, replica, (row, epoch) in zip(numbers, replicas, self._next_rows(len(replicas)), strict=True):
            self.prompts[number] = Prompt(row, epoch, replica, self.weights.version)
        self.controller["rollout"].submit(self._batch_of(numbers))

    def _next_rows(self, size: int) -> list[tuple[int, int]]:
        old = [self.again.popleft() for _ in range(min(size, len(self.again)))]
        rows, epochs = (
            self.context.sampler.next_rows(size - len(old)) if size > len(old) else (np.zeros(0), np.zeros(0))
        )
        return old + list(zip(rows.tolist(), epochs.tolist(), strict=True))

    def _batch_of(self, numbers: range | list[int]) -> DataProto:
        """The samples of these prompts, without drawn columns."""
        prompts = [self.prompts[number] for number in numbers]
        samples: dict[str, np.ndarray] = {
            "prompt": np.array(numbers, np.int32),
            "row": np.array([prompt.row for prompt in prompts], np.int64),
            "epoch": np.array([prompt.epoch for prompt in prompts], np.int64),
            self.column: np.array([prompt.replica for prompt in prompts], np.int32),
        }
        n = self.config.rollout.n
        batch = DataProto({}, samples, {"split": "train"}).repeat(n)
        batch.samples["sample_index"] = np.tile(np.arange(n, dtype=np.int64), len(prompts))
        return batch

    def _ready_versions(self) -> list[int]:
        """Versions of the prompts that can be trained."""
        return _versions(self.pool.surplus)[1].tolist() if self.pool.surplus is not None else []

    def _has_to_wait(self, step: int, here: list[int]) -> bool:
        """Whether the step needs more prompts than those of these versions."""
        size, threshold = self.config.data.train_batch_size, self.config.async_training.staleness_threshold
        if len(here) < size:
            return True
        live = self._ready_versions() + [prompt.version for prompt in self.prompts.values()]
        for version in set(live):
            # Places of later steps for what is due by then; none for what a resumed run is late with.
            later = max(0, version + 1 + threshold - step) * size
            if sum(v <= version for v in here) < sum(v <= version for v in live) - later:
                return True
        return False

    def _take(self, step: int) -> None:
        """Take finished samples and their scores from the replicas."""
        if not self.finished:
            return
        numbers, self.finished = sorted(self.finished), set()
        batch = self._batch_of(numbers)
        with self.context.timers("gen"):
            batch = batch.union(self.controller["rollout"].take_responses(batch).get())
        batch = score(self.controller, batch, self.config.reward, self.context.timers)
        self.pool.first_samples.check_scores(batch)
        self.seen.metrics += batch.metrics
        self.seen.num_generated += len(batch)
        self.context.sampler.update(step_report(step, batch.samples))
        for number in numbers:
            del self.prompts[number]
        batch.pop([self.column])
        batch.meta_info.clear()
        if self.config.algorithm.filter_groups.enable:
            num_finished = num_prompts(batch)
            batch = self.pool.filtered(batch, self.seen)
            self.num_submitted -= num_finished - num_prompts(batch)
        if len(batch):
            self.pool.surplus = batch if self.pool.surplus is None else DataProto.concat([self.pool.surplus, batch])
        self._submit()

    def _oldest(self, step: int) -> DataProto:
        """The step's prompts: those that are due first."""
        ready = self.pool.surplus
        assert ready is not None
        ready = ready[np.lexsort((ready.samples["sample_index"], ready.samples["prompt"]))]
        numbers, versions = _versions(ready)
        chosen = numbers[np.lexsort((numbers, versions))[: self.config.data.train_batch_size]]
        taken = np.isin(ready.samples["prompt"], chosen)
        self.pool.surplus = ready[~taken] if not taken.all() else None
        return numbered(ready[taken], step)


def _versions(batch: DataProto) -> tuple[np.ndarray, np.ndarray]:
    """Each prompt's number, and the version of the first token drawn for it."""
    numbers, group = np.unique(batch.samples["prompt"], return_inverse=True)
    versions = np.full(len(numbers), np.iinfo(np.int64).max)
    np.minimum.at(versions, group, batch.samples["weight_version_min"])
    return numbers, versions
