"""Why a phase takes longer than predicted: rules over what a step has measured, the most certain ones first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hpcrl.run.performance import Slow

WORKING = 0.5  # share of a phase's seconds that its busiest rank works, otherwise ranks wait
UNEVEN = 1.5  # times the median rank's busy seconds
FULL = 0.95  # share of a GPU's memory
SWAPPED = 2**26  # bytes of a process in swap that are worth a line
LEAST = 0.1  # share of a kind in a prediction that is named


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


def likely_cause(found: Evidence) -> str:
    """The first rule's line that applies."""
    return next(line for rule in RULES if (line := rule(found)) is not None)


def _straggler(found: Evidence) -> str | None:
    for slow in found.slow:
        if slow.phase in found.methods:
            return f"rank {slow.rank} on {slow.node} is slower than its peers in it"
    return None


def _swap(found: Evidence) -> str | None:
    if found.swapped < SWAPPED:
        return None
    return (
        f"{found.swapped / 2**30:.2g} GiB of rank 0's process are in swap: the node's memory is full; offload less, or "
        "ask for more (job.mem)"
    )


def _full_device(found: Evidence) -> str | None:
    reserved = found.most("memory", "/reserved_gb")
    if found.device_gib is None or reserved < FULL * found.device_gib:
        return None
    return (
        f"{reserved:.4g} of a GPU's {found.device_gib:.4g} GiB are reserved, so that the allocator frees and allocates "
        "again; `hpcrl plan` names keys that need less"
    )


def _generations(found: Evidence) -> str | None:
    count = found.metrics.get("train/num_gen_batches", 1.0)
    if found.phase != "gen" or count <= 1:
        return None
    return f"algorithm.filter_groups took {count:.0f} generations, and one is predicted"


def _tools(found: Evidence) -> str | None:
    if found.phase != "gen" or found.metrics.get("tool_call_counts/max", 0.0) <= 0:
        return None
    return "generation waits for tools, whose time is not predicted"


def _uneven(found: Evidence) -> str | None:
    busiest, usual = found.most("perf/busy_s", "/max"), found.most("perf/busy_s", "/median")
    if busiest < UNEVEN * usual or busiest < WORKING * found.seconds:
        return None
    return f"the busiest rank works {busiest:.3g} s, the median one {usual:.3g} s: the work is uneven"


def _rewards(found: Evidence) -> str | None:
    return "it includes reward functions, whose time is not predicted" if found.phase == "reward" else None


def _waiting(found: Evidence) -> str | None:
    busiest = found.most("perf/busy_s", "/max")
    if busiest == 0 or busiest >= WORKING * found.seconds:
        return None
    return (
        f"the busiest rank works {busiest:.3g} of {found.seconds:.3g} s and waits for messages otherwise: the links "
        f"may be slower than {found.machine} says, or rank 0 is late"
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


def _limit(found: Evidence) -> str:
    kind, share = max(found.parts.items(), key=lambda part: part[1], default=("", 0.0))
    advice = "`hpcrl check --job --machine FILE` measures it"
    if not found.is_fitted:
        advice += "; the file has no efficiency of this phase, which `hpcrl plan --calibrate` fits"
    if share < LEAST or kind not in LIMITS:
        return f"the machine may be slower than {found.machine} says: {advice}"
    return f"{share:.0%} of the prediction is {kind}; {LIMITS[kind]} than {found.machine} says: {advice}"


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
