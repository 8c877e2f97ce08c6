"""What the steps cost: MFU, memory and busy seconds of the ranks, stragglers, and traces of profiled steps."""

from __future__ import annotations

import contextlib
import json
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from hpcrl.config.derive import Derived
from hpcrl.config.schema import Config
from hpcrl.controller.busy import BusyReport, MemoryUse
from hpcrl.controller.controller import Controller, Future
from hpcrl.model.params import has_fp8_products
from hpcrl.model.shape import ModelShape, forward_flops, training_flops
from hpcrl.model.vision import tower_training_factor
from hpcrl.run.job_parts import Report
from hpcrl.run.rollouts.source import idle_metrics
from hpcrl.runtime.watchdog import STRAGGLERS_FILE
from hpcrl.workers.response_columns import ROLLOUT_BUSY_S, TOWER_FLOPS

if TYPE_CHECKING:
    from hpcrl.run.predicted import PredictedSteps
    from hpcrl.run.run import Run


def mfu_metrics(
    config: Config,
    derived: Derived,
    shape: ModelShape,
    lengths: Sequence[int],
    num_responses: int,
    seconds: Mapping[str, float],
    peak: float,
    tower: float = 0.0,
) -> dict[str, float]:
    """verl's `perf/mfu/{actor,actor_infer,critic}`, of the phases that the step had: model FLOPs utilisation (Chowdhery
    et al. 2022, arXiv:2204.02311, section 4.1), the least operations of a phase's matrix products as a share of what
    its devices could have done in the seconds that the controller waited for it.

    The controller waits for concurrent phases one after the other, so only the first one's time is complete.

    Args:
        lengths: tokens of each sample.
        num_responses: response tokens of all samples.
        seconds: seconds by `timing_s/<phase>`.
        peak: peak of one device, see `peak_of`.
        tower: operations of a pass of the vision tower over the step's pictures, if each pass of a model runs it.
    """
    has_adapters = config.model.lora_rank > 0
    to_train = tower * tower_training_factor(shape.vision) if shape.vision is not None else 0.0
    update = training_flops(shape, lengths, num_responses, has_adapters=has_adapters) + to_train
    update_critic = training_flops(shape, lengths, 0) + to_train
    metrics = {}
    for phase, role, name, flops in (
        ("old_log_prob", "actor", "actor_infer", forward_flops(shape, lengths, num_responses) + tower),
        ("update_actor", "actor", "actor", config.actor.ppo_epochs * update),
        ("update_critic", "critic", "critic", derived.critic_ppo_epochs * update_critic),
    ):
        if f"timing_s/{phase}" in seconds and role in derived.roles:
            possible_flops = seconds[f"timing_s/{phase}"] * peak * len(derived.roles[role].ranks)
            metrics[f"perf/mfu/{name}"] = flops / possible_flops
    return metrics


GIB = 2**30


def memory_metrics(reports: Sequence[BusyReport]) -> dict[str, float]:
    """GiB of the rank that uses most: `memory/<phase>/{allocated,reserved,host}_gb`, `memory/host_buffers_gb` and, over
    all phases, `perf/max_memory_{allocated,reserved}_gb`. Values that are 0 on all ranks are left out."""
    by_phase: dict[str, MemoryUse] = {}
    for report in reports:
        for phase, used in report.memory.items():
            by_phase[phase] = used.or_more(by_phase.get(phase, MemoryUse()))
    most = reduce(MemoryUse.or_more, by_phase.values(), MemoryUse())
    metrics = {
        f"memory/{phase}/{name}_gb": nbytes
        for phase, used in by_phase.items()
        for name, nbytes in used._asdict().items()
    }
    metrics |= {f"perf/max_memory_{name}_gb": getattr(most, name) for name in ("allocated", "reserved")}
    metrics["memory/host_buffers_gb"] = max((report.host_buffers for report in reports), default=0)
    return {name: nbytes / GIB for name, nbytes in metrics.items() if nbytes > 0}


log = logging.getLogger(__name__)

RATIO = 1.3  # times the median of its peers
EXCESS = 0.5  # seconds per step, at least, before it is logged
STEPS = 10  # that are evaluated together
FEWEST = 3  # ranks that can be compared

# (phase, rank) -> a key that is equal for peers, which do the same work in a phase
Likeness = Callable[[str, int], Hashable]


class Slow(NamedTuple):
    rank: int
    node: str
    phase: str


def busy_metrics(reports: Sequence[BusyReport]) -> dict[str, float]:
    """`perf/busy_s/<phase>/{min,median,max}` over the ranks that were in the phase."""
    by_phase: dict[str, list[float]] = defaultdict(list)
    for report in reports:
        for phase, seconds in report.seconds.items():
            by_phase[phase].append(seconds)
    return {
        f"perf/busy_s/{phase}/{name}": statistic(seconds)
        for phase, seconds in by_phase.items()
        for name, statistic in (("min", min), ("median", median), ("max", max))
    }


def slow_ranks(reports: Sequence[BusyReport], likeness: Likeness) -> dict[Slow, float]:
    """Ranks that were busy for much longer than the median of their peers, with the ratio."""
    alike: dict[Hashable, list[tuple[BusyReport, str]]] = defaultdict(list)
    for report in reports:
        for phase in report.seconds:
            alike[phase, likeness(phase, report.rank)].append((report, phase))
    ratios = {}
    for members in alike.values():
        usual = median(report.seconds[phase] for report, phase in members)
        for report, phase in members if len(members) >= FEWEST else []:
            seconds = report.seconds[phase]
            if seconds > RATIO * usual and seconds - usual > EXCESS:
                ratios[Slow(report.rank, report.node, phase)] = seconds / max(usual, 1e-3)
    return ratios


def lasting(history: Sequence[dict[Slow, float]]) -> Iterator[tuple[Slow, int, float]]:
    """Ranks that were slow in most of the last STEPS steps, with the number of steps and the median ratio."""
    counts = Counter(slow for step in history for slow in step)
    for slow, count in sorted(counts.items()):
        if 2 * count > STEPS:
            yield slow, count, median(step[slow] for step in history if slow in step)


class Stragglers:
    """Finds ranks that are slower than their peers. Lives on rank 0.

    Args:
        folder: the run's folder, for STRAGGLERS_FILE.
        waits: whether `observe` waits for the reports of all ranks at the end of a step; otherwise it uses the last
            complete set of reports.
    """

    def __init__(self, controller: Controller, folder: Path, *, waits: bool) -> None:
        self._controller = controller
        self._path = folder / STRAGGLERS_FILE
        self._waits = waits
        self._asked: Future[list[BusyReport]] | None = None
        self._history: deque[dict[Slow, float]] = deque(maxlen=STEPS)
        self._logged: set[Slow] = set()

    @property
    def slow(self) -> list[Slow]:
        """Ranks that were slow in most of the last steps."""
        return sorted(self._logged)

    def observe(self, step: int) -> dict[str, float]:
        """Busy seconds and memory of the ranks since the last call, validation and saves included; {} while reports are
        missing. Logs each straggler once."""
        asked = self._asked or self._controller.ask_busy(step)
        if not self._waits and not asked.is_ready:
            self._asked = asked
            return {}
        self._asked = None if self._waits else self._controller.ask_busy(step)
        reports = asked.get()
        self._history.append(slow_ranks(reports, self._likeness))
        self._warn(step)
        return busy_metrics(reports) | memory_metrics(reports)

    def _warn(self, step: int) -> None:
        stragglers = list(lasting(self._history))
        for slow, count, ratio in stragglers:
            if slow in self._logged:
                continue
            log.warning(
                "rank %d on %s is %.0f%% slower than its peers in %s, in %d of the last %d steps; if this continues, "
                "exclude the node: sbatch --exclude=%s",
                *(slow.rank, slow.node, 100 * (ratio - 1), slow.phase, count, len(self._history), slow.node),
            )
            with contextlib.suppress(OSError), open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **slow._asdict(), "ratio": round(ratio, 2)}) + "\n")
        self._logged = {slow for slow, _, _ in stragglers}

    def _likeness(self, phase: str, rank: int) -> Hashable:
        """A key that is equal for peers: pipeline stages differ in layers, and leaders do more work than other ranks of
        a replica."""
        layout = self._controller[phase.split(".")[0]].layout
        coord = layout.coord(rank)
        return coord.pp, rank == layout.leader(coord.dp)


PROFILE_FOLDER = "profile"


class ProfiledSteps:
    """Writes a trace on every rank in the steps of `trainer.profile_steps`, from `begin(step)` to `end()`. Lives on
    rank 0.

    Args:
        folder: the run's folder.
        waits: whether a step ends only when all its traces are written.
    """

    def __init__(self, controller: Controller, folder: Path, steps: Collection[int], *, waits: bool) -> None:
        self._controller = controller
        self._folder = folder / PROFILE_FOLDER
        self._steps = frozenset(steps)
        self._waits = waits
        self._step: int | None = None  # that is profiled now
        self._written: deque[tuple[int, Future[list[str | None]]]] = deque()

    def begin(self, step: int) -> None:
        self._report()
        if step in self._steps:
            self._step = step
            self._controller.begin_profile()

    def end(self) -> None:
        """End the step's trace, if it has one, and write it."""
        if self._step is not None:
            self._written.append((self._step, self._controller.end_profile(str(self._stem(self._step)))))
            self._step = None
        self._report()

    def discard(self) -> None:
        """End the trace of a step that is stopped, without a file: the next slice does the whole of it."""
        if self._step is not None:
            self._controller.end_profile(None)

    def close(self) -> None:
        """Wait for the traces that are still to be written."""
        self._waits = True
        self._report()

    def _stem(self, step: int) -> Path:
        return self._folder / f"step_{step:08d}"

    def _report(self) -> None:
        """Log where the traces of a step are, and warn if some are missing."""
        while self._written and (self._waits or self._written[0][1].is_ready):
            step, written = self._written.popleft()
            outcomes = written.get()
            failed = {rank: why for rank, why in enumerate(outcomes) if why is not None}
            if len(failed) < len(outcomes):
                log.info("profile of step %d: %s_rank_*.json.gz", step, self._stem(step))
            if failed:
                rank, why = next(iter(failed.items()))
                log.warning(
                    "%d of the traces of step %d could not be written; training continues without them; rank %d: %s",
                    *(len(failed), step, rank, why),
                )


# Dense bf16 and fp8 operations per second of one device, from data sheets; the first matching name is used. A device of
# an MI250X is one of its two dies.
PEAKS = {
    "GB200": (2.5e15, 5e15),
    "B200": (2.25e15, 4.5e15),
    "H200": (989e12, 1979e12),
    "H100": (989e12, 1979e12),
    "H800": (989e12, 1979e12),
    "GH200": (989e12, 1979e12),
    "A100": (312e12, None),
    "A800": (312e12, None),
    "H20": (148e12, 296e12),
    "L40S": (362e12, 733e12),
    "MI300X": (1307e12, 2615e12),
    "MI250X": (191.5e12, None),
}


def peak_of(device_name: str, *, fp8: bool = False) -> float | None:
    """Return the bf16 operations per second of a device by torch's name; None if unknown.

    Args:
        fp8: whether there are 8-bit products; then those of fp8, although small products, attention and the head are
            not.
    """
    words = device_name.replace("-", " ").split()
    return next((peaks[fp8] for name, peaks in PEAKS.items() if name in words), None)


class TrainReport(Report):
    """Of `hpcrl train` and jobs like it: utilisation, predicted seconds, and idle shares of asynchronous modes."""

    shown = {
        "score": "critic/score/mean",
        "length": "response_length/mean",
        "entropy": "actor/entropy",
        "ratio_kl": "actor/ppo_kl",
    }
    phases_per_token = ("gen", "ref", "teacher", "values", "adv", "update_critic", "update_actor")
    is_predicted = True  # the time of steps, by job.machine
    predicted: PredictedSteps | None = None
    peak_flops: float | None = None  # of a device, if it is known

    @property
    def label(self) -> str:
        return "ppo" if self.job.derived.needs_critic else str(self.job.config.algorithm.adv_estimator)

    def set_up(self, run: Run) -> None:
        job, model = self.job, self.job.config.model
        if run.device_name:
            fp8 = has_fp8_products(job.inputs.shape, model.transformer_engine.fp8, job.derived.roles["actor"].tp)
            self.peak_flops = peak_of(run.device_name, fp8=fp8)
        if job.config.job.machine is not None and self.is_predicted:
            from hpcrl.run.predicted import PredictedSteps

            self.predicted = PredictedSteps.of_job(job, run)

    def step_metrics(
        self, run: Run, seconds: dict[str, float], lengths: list[int], num_response_tokens: int
    ) -> dict[str, float]:
        config, derived = self.job.config, self.job.derived
        metrics: dict[str, float] = {}
        if self.predicted is not None:
            prompts, responses = run.prompt_lengths, run.response_lengths
            metrics |= self.predicted.observe(seconds, prompts, responses, run.metrics, run.stragglers.slow)
        if self.peak_flops is not None:
            sizes = (config, derived, self.job.inputs.shape, lengths, num_response_tokens)
            metrics |= mfu_metrics(*sizes, seconds, self.peak_flops, run.metrics.get(TOWER_FLOPS, 0.0))
        if config.async_training.mode != "sync":
            busy = run.metrics.get(ROLLOUT_BUSY_S, 0.0)  # missing if surplus samples were enough for the step
            waited, step = seconds.get("timing_s/gen", 0.0), seconds["timing_s/step"]
            metrics |= idle_metrics(waited, busy, step, derived.roles["rollout"].dp)
        return metrics
