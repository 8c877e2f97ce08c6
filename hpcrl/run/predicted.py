"""Predicted beside measured seconds of a step's phases, and a line for a phase that takes longer for many steps."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpcrl.config.schema import Config
from hpcrl.controller.controller import Controller
from hpcrl.forecast.memory.memory import TrainingPlan, with_keys
from hpcrl.forecast.time.layers import with_measured_load
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.step import APART, Prediction, forget_lengths, predict
from hpcrl.machine.machine_file import Machine, read_machine
from hpcrl.run.likely_cause import Evidence, likely_cause
from hpcrl.run.performance import EXCESS, STEPS, Slow

if TYPE_CHECKING:
    from hpcrl.run.job import TrainingJob
    from hpcrl.run.run import Run

log = logging.getLogger(__name__)

RATIO = 1.5  # times the expected seconds
FIRST = 2  # steps of a process that are not compared: they compile, capture graphs and fill caches
LEAST = 0.01  # share of a step that a phase takes at least to be compared with
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
        return self.measured > RATIO * self.expected and self.measured - self.expected > EXCESS


def compared(
    prediction: Prediction, seconds: Mapping[str, float], phases: Collection[str], fitted: Collection[str]
) -> list[Compared]:
    """The phases of a step. seconds: measured. fitted: phases of which the machine file has an efficiency.

    The controller waits for overlapping phases one after the other, and works in the meantime if rank 0 is in one of
    them, so only their sum is comparable. Without an efficiency the prediction is an ideal time, which is multiplied by
    the median ratio of the step's other phases, if that is above 1; without other phases there is nothing to expect.
    """
    pairs = [
        (names, sum(seconds.get(name, 0.0) for name in names), predicted)
        for names, predicted in prediction.together(phases)
        if predicted > 0
    ]
    least, found = LEAST * sum(measured for _, measured, _ in pairs), []
    for names, measured, predicted in pairs:
        factor = 1.0
        if not set(names) <= set(fitted):
            others = [it / ideal for other, it, ideal in pairs if other != names and it > least]
            factor = max(1.0, median(others)) if others else math.inf
        found.append(Compared(names, measured, predicted, predicted * factor))
    return found


class Slowdowns:
    """Phases that are slow in consecutive steps."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, ...], list[Compared]] = defaultdict(list)
        self._logged: set[tuple[str, ...]] = set()

    def observe(self, step: Sequence[Compared]) -> list[list[Compared]]:
        """The last STEPS steps of each phase that has been slow in all of them, once per phase."""
        found = []
        for it in step:
            history = self._steps[it.phases]
            history.append(it)
            if not it.is_slow:
                history.clear()
            elif len(history) == STEPS:
                del self._steps[it.phases]
                if it.phases not in self._logged:
                    found.append(history)
                    self._logged.add(it.phases)
        return found


class PredictedSteps:
    """Predicts each step of a job from its lengths, and warns of phases that take longer. Lives on rank 0.

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

        seconds: its timing_s/*. prompts, responses: tokens of each sample. metrics: its other metrics.
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
        found = {phase: it for phase, it in prediction.phases.items() if f"timing_s/{phase}" in seconds}
        found = {"step": prediction.step} | found
        shown = {phase: it for phase, it in found.items() if phase not in self._left_out}
        self._num_observed += 1
        if self._num_observed > FIRST:
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
