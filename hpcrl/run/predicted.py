"""Predicted beside measured seconds of a step's phases, and a line for a phase that takes longer for many steps.

The line names the likely cause, by rules over what a step has measured, the most certain ones first.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpcrl.config.schema import Config
from hpcrl.controller.controller import Controller
from hpcrl.forecast.memory.memory import TrainingPlan, with_keys
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.step import APART, Prediction, forget_lengths, predict, with_measured_load
from hpcrl.machine.machine_file import Machine, read_machine
from hpcrl.run.performance import EXCESS, STEPS, Slow
from hpcrl.run.rollouts.source import NUM_GEN_BATCHES

if TYPE_CHECKING:
    from hpcrl.run.job import TrainingJob
    from hpcrl.run.run import Run

log = logging.getLogger(__name__)

WORKING = 0.5  # share of a phase's seconds that its busiest rank works, otherwise ranks wait
UNEVEN = 1.5  # times the median rank's busy seconds
FULL = 0.95  # share of a GPU's memory
SWAPPED = 2**26  # bytes of a process in swap that are worth a line
LEAST_DIFFERENCE = 0.1  # share of a kind in a prediction that is named


class Evidence(NamedTuple):
    """What is known of a phase that takes longer than predicted.

    methods: "role.method" of those that run in it. seconds: measured. parts: the prediction's shares, by what limits
    it. metrics: of the last step. is_fitted: whether the machine file has an efficiency of the phase. slow: ranks that
    are slower than their peers. swapped: bytes of rank 0's process. device_gib: memory of a GPU; None: there is none,
    or it is not known.
    """

    phase: str
    methods: Sequence[str]
    seconds: float
    parts: Mapping[str, float]
    metrics: Mapping[str, float]
    machine: str
    is_fitted: bool = True
    slow: Sequence[Slow] = ()
    swapped: int = 0
    device_gib: float | None = None

    def most(self, name: str, statistic: str) -> float:
        """The largest of a metric over the phase's methods; 0 without it."""
        return max((self.metrics.get(f"{name}/{method}{statistic}", 0.0) for method in self.methods), default=0.0)


def likely_cause(evidence: Evidence) -> str:
    """The first rule's line that applies."""
    return next(line for rule in RULES if (line := rule(evidence)) is not None)


def _straggler(evidence: Evidence) -> str | None:
    in_it = (slow for slow in evidence.slow if slow.phase in evidence.methods)
    return next((f"rank {slow.rank} on {slow.node} is slower than its peers in it" for slow in in_it), None)


def _swap(evidence: Evidence) -> str | None:
    if evidence.swapped < SWAPPED:
        return None
    return (
        f"{evidence.swapped / 2**30:.2g} GiB of rank 0's process are in swap: the node's memory is full; offload less, "
        "or ask for more (job.mem)"
    )


def _full_device(evidence: Evidence) -> str | None:
    reserved = evidence.most("memory", "/reserved_gb")
    if evidence.device_gib is None or reserved < FULL * evidence.device_gib:
        return None
    return (
        f"{reserved:.4g} of a GPU's {evidence.device_gib:.4g} GiB are reserved, so that the allocator frees and "
        "allocates again; `hpcrl plan` names keys that need less"
    )


def _generations(evidence: Evidence) -> str | None:
    count = evidence.metrics.get(NUM_GEN_BATCHES, 1.0)
    if evidence.phase != "gen" or count <= 1:
        return None
    return f"algorithm.filter_groups took {count:.0f} generations, and one is predicted"


def _tools(evidence: Evidence) -> str | None:
    if evidence.phase != "gen" or evidence.metrics.get("tool_call_counts/max", 0.0) <= 0:
        return None
    return "generation waits for tools, whose time is not predicted"


def _uneven(evidence: Evidence) -> str | None:
    busiest, usual = evidence.most("perf/busy_s", "/max"), evidence.most("perf/busy_s", "/median")
    if busiest < UNEVEN * usual or busiest < WORKING * evidence.seconds:
        return None
    return f"the busiest rank works {busiest:.3g} s, the median one {usual:.3g} s: the work is uneven"


def _rewards(evidence: Evidence) -> str | None:
    return "it includes reward functions, whose time is not predicted" if evidence.phase == "reward" else None


def _waiting(evidence: Evidence) -> str | None:
    busiest = evidence.most("perf/busy_s", "/max")
    if busiest == 0 or busiest >= WORKING * evidence.seconds:
        return None
    return (
        f"the busiest rank works {busiest:.3g} of {evidence.seconds:.3g} s and waits for messages otherwise: the links "
        f"may be slower than {evidence.machine} says, or rank 0 is late"
    )


LIMITS = {  # kind of a prediction's seconds -> what may be slower than the machine file says
    "products": "matrix products may be slower: clocks, other programs",
    "attention": "attention may be slower: the KV cache's memory, another kernel",
    "memory": "memory may be slower: other programs, memory of another socket",
    "launches": "hosts may launch operators more slowly: too few cores per rank (job.cpus_per_task), other programs",
    "communication": "the links may be slower",
    "bubble": "pipeline stages may differ more",
    "copies": "copies to host memory or the file system may be slower",
    "waiting": "ranks may have fewer cores",
}


def _limit(evidence: Evidence) -> str:
    kind, share = max(evidence.parts.items(), key=lambda part: part[1], default=("", 0.0))
    advice = "`hpcrl check --job --machine FILE` measures it"
    if not evidence.is_fitted:
        advice += "; the file has no efficiency of this phase, which `hpcrl plan --calibrate` fits"
    if share < LEAST_DIFFERENCE or kind not in LIMITS:
        return f"the machine may be slower than {evidence.machine} says: {advice}"
    return f"{share:.0%} of the prediction is {kind}; {LIMITS[kind]} than {evidence.machine} says: {advice}"


RULES: tuple[Callable[[Evidence], str | None], ...] = (
    _straggler,
    _swap,
    _full_device,
    _generations,
    _tools,
    _uneven,
    _rewards,
    _waiting,
    _limit,
)

SLOW_RATIO = 1.5  # times the expected seconds
WARM_UP_STEPS = 2  # steps of a process that are not compared: they compile, capture graphs and fill caches
LEAST_SHARE = 0.01  # share of a step that a phase takes at least to be compared with
SAMPLED = ("gen", "gen_max", "judge", "reward")
PHASES = {"rollout.generate": "gen", "refit.update_weights": "update_weights", "reward.compute_rm_score": "reward"}


class Compared(NamedTuple):
    """Seconds of phases that overlap, together. expected: predicted, times what the machine file leaves out."""

    phases: tuple[str, ...]
    measured: float
    predicted: float
    expected: float

    @property
    def is_slow(self) -> bool:
        return self.measured > SLOW_RATIO * self.expected and self.measured - self.expected > EXCESS


def compared(
    prediction: Prediction, seconds: Mapping[str, float], phases: Collection[str], fitted: Collection[str]
) -> list[Compared]:
    """The phases of a step.

    The controller waits for overlapping phases one after the other, and works in the meantime if rank 0 is in one of
    them, so only their sum is comparable. Without an efficiency the prediction is an ideal time, which is multiplied by
    the median ratio of the step's other phases, if that is above 1; without other phases there is nothing to expect.

    Args:
        seconds: the measured seconds.
        fitted: phases of which the machine file has an efficiency.
    """
    pairs = [
        (names, sum(seconds.get(name, 0.0) for name in names), predicted)
        for names, predicted in prediction.together(phases)
        if predicted > 0
    ]
    least, comparisons = LEAST_SHARE * sum(measured for _, measured, _ in pairs), []
    for names, measured, predicted in pairs:
        factor = 1.0
        if not set(names) <= set(fitted):
            others = [it / ideal for other, it, ideal in pairs if other != names and it > least]
            factor = max(1.0, median(others)) if others else math.inf
        comparisons.append(Compared(names, measured, predicted, predicted * factor))
    return comparisons


class Slowdowns:
    """Phases that are slow in consecutive steps."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, ...], list[Compared]] = defaultdict(list)
        self._logged: set[tuple[str, ...]] = set()

    def observe(self, step: Sequence[Compared]) -> list[list[Compared]]:
        """The last STEPS steps of each phase that has been slow in all of them, once per phase."""
        histories = []
        for it in step:
            history = self._steps[it.phases]
            history.append(it)
            if not it.is_slow:
                history.clear()
            elif len(history) == STEPS:
                del self._steps[it.phases]
                if it.phases not in self._logged:
                    histories.append(history)
                    self._logged.add(it.phases)
        return histories


class PredictedSteps:
    """Predicts each step of a job from its lengths, and warns of phases that take longer. Lives on rank 0.

    Args:
        methods: "role.method" by phase.
    """

    def __init__(self, plan: TrainingPlan, machine: Machine, methods: Mapping[str, Sequence[str]]) -> None:
        self._plan, self._machine, self._methods = plan, machine, methods
        self._plans = {plan.config.model.moe.load_imbalance: plan}  # by the load of experts
        self._left_out = left_out(plan.config)
        self._slowdowns = Slowdowns()
        self._num_observed = 0
        self._is_possible = True

    @classmethod
    def of_job(cls, job: TrainingJob, run: Run) -> PredictedSteps:
        """For the machine that job.machine names, and the ranks that run."""
        world, name = job.world, job.config.job.machine
        assert name is not None
        on_gpu = world.device.type == "cuda"
        config = on_ranks(job.config, world.size, world.local_size, on_gpu, job.inputs.shape.vocab_size)
        plan = TrainingPlan(config, tuple(job.own_specs()))
        return cls(plan, read_machine(name), methods_by_phase(run.controller))

    def observe(
        self,
        seconds: Mapping[str, float],
        prompts: Sequence[int] | np.ndarray,
        responses: Sequence[int] | np.ndarray,
        metrics: Mapping[str, float],
        slow: Sequence[Slow] = (),
    ) -> dict[str, float]:
        """`perf/predicted_s/<phase>` of the phases that a step had, and of the step; {} if it cannot be predicted.

        Args:
            seconds: the step's timing_s/*.
            prompts, responses: tokens of each sample.
            metrics: the step's other metrics.
        """
        if not self._is_possible or not len(prompts):
            return {}
        try:
            lengths = Lengths.of_samples(np.asarray(prompts).tolist(), np.asarray(responses).tolist())
            prediction = predict(self._plan_of(metrics), self._machine, lengths)
        except Exception as error:  # the run continues without it
            log.warning("steps are not predicted: %s: %s", type(error).__name__, error)
            self._is_possible = False
            return {}
        forget_lengths()
        predicted = {phase: it for phase, it in prediction.phases.items() if f"timing_s/{phase}" in seconds}
        predicted = {"step": prediction.step} | predicted
        shown = {phase: it for phase, it in predicted.items() if phase not in self._left_out}
        self._num_observed += 1
        if self._num_observed > WARM_UP_STEPS:
            measured = {phase: seconds[f"timing_s/{phase}"] for phase in shown}
            self._warn(prediction, compared(prediction, measured, shown, self._machine.efficiency), metrics, slow)
        return {f"perf/predicted_s/{phase}": it for phase, it in shown.items()}

    def _plan_of(self, metrics: Mapping[str, float]) -> TrainingPlan:
        """The plan with the load of experts that a step had."""
        config = with_measured_load(self._plan.config, metrics)
        load = config.model.moe.load_imbalance
        if load not in self._plans:
            self._plans[load] = TrainingPlan(config, self._plan.own_roles)
        return self._plans[load]

    def _warn(
        self, prediction: Prediction, step: Sequence[Compared], metrics: Mapping[str, float], slow: Sequence[Slow]
    ) -> None:
        for history in self._slowdowns.observe(step):
            phases, last = history[-1].phases, history[-1]
            phase = max(phases, key=lambda name: prediction.phases[name])
            methods = [method for name in phases for method in self._methods.get(name, ())]
            evidence = Evidence(
                phase,
                methods,
                last.measured,
                prediction.parts[phase],
                metrics,
                self._machine.name,
                set(phases) <= set(self._machine.efficiency),
                slow,
                swapped_bytes(),
                self._machine.device.memory_gib if self._plan.on_gpu else None,
            )
            factor = median(it.expected / it.predicted for it in history)
            log.warning(
                "%s takes %.3g s, %.2g times its predicted time%s, for %d steps; likely cause: %s",
                " + ".join(phases),
                median(it.measured for it in history),
                median(it.measured / it.predicted for it in history),
                f" (other phases: {factor:.2g} times theirs)" if factor > 1 else "",
                len(history),
                likely_cause(evidence),
            )


def left_out(config: Config) -> tuple[str, ...]:
    """Phases whose measured seconds are of something else than the predicted ones."""
    if config.trainer.rollouts_from is not None:
        return (*APART, "gen", "gen_max", "step")  # samples are read
    return APART if config.async_training.mode == "sync" else (*APART, *SAMPLED)  # only the wait for samples


def on_ranks(config: Config, num_ranks: int, ranks_per_node: int, on_gpu: bool, vocab_size: int) -> Config:
    """The config with the ranks that there are, and the tokenizer's number of tokens, so that it is not read again. If
    nodes have different numbers of ranks, smaller nodes of equal numbers are taken."""
    each = math.gcd(num_ranks, ranks_per_node)
    sizes = {"nodes": num_ranks // each, "ntasks_per_node": each, "gpus_per_node": each * on_gpu}
    changes = {f"job.{name}": number for name, number in sizes.items()}
    if config.model.path is None:
        changes["model.vocab_size"] = vocab_size
    return with_keys(config, changes)


def methods_by_phase(controller: Controller) -> dict[str, list[str]]:
    """ "role.method" of registered methods by the phase whose time includes the wait for them."""
    found: dict[str, list[str]] = defaultdict(list)
    for role, group in controller.groups.items():
        for name in dir(group.worker):
            registration = getattr(getattr(group.worker, name), "registration", None)
            if registration is not None:
                method = f"{role}.{name}"
                found[PHASES.get(method) or registration.phase or name].append(method)
    return dict(found)


def swapped_bytes() -> int:
    """Of this process in swap; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSwap:")), 0)
