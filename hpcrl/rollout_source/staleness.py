"""How old the samples of a step are: versions count the steps that weights have been trained for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def staleness_metrics(samples: Mapping[str, np.ndarray], version: int) -> dict[str, float]:
    """Metrics of the samples that an update of the weights of `version` trains on.

    Staleness is `version - weight_version_min`: from the weights that drew the first token to those that are trained.
    A span is `weight_version_max - weight_version_min`; a response with one went on under new weights.
    """
    oldest, newest = samples["weight_version_min"], samples["weight_version_max"]
    spans = newest - oldest
    return {
        **_statistics("training/off_policy/trajectory_staleness", version - oldest),
        **_statistics("training/off_policy/trajectory_spans", spans),
        "fully_async/partial/total_partial_num": float((spans > 0).sum()),
        "fully_async/partial/partial_ratio": float((spans > 0).mean()),
        "fully_async/partial/max_partial_span": float(spans.max()),
    }


def _statistics(name: str, values: np.ndarray) -> dict[str, float]:
    found = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{statistic}": float(value) for statistic, value in found.items()}


def idle_metrics(waited: float, busy: float, step: float, num_replicas: int) -> dict[str, float]:
    """Shares of a step's seconds: `waited` by the trainer for samples, and left over by the replicas, which together
    were `busy` generating for so long."""
    return {
        "fully_async/trainer/idle_ratio": waited / step,
        "fully_async/rollouter/idle_ratio": max(0.0, 1.0 - busy / (step * num_replicas)),
    }


class Counts:
    """What adds up over a run."""

    def __init__(self) -> None:
        self.generated = 0
        self.stale = 0

    def add(self, samples: Mapping[str, np.ndarray], version: int, num_generated: int) -> dict[str, float]:
        """Counts a step's samples, and gives the sums."""
        self.generated += num_generated
        self.stale += int((samples["weight_version_min"] < version).sum())
        return {
            "fully_async/count/total_generated_samples": float(self.generated),
            "fully_async/count/stale_samples_processed": float(self.stale),
            "fully_async/count/current_param_version": float(version),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"generated": self.generated, "stale": self.stale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generated, self.stale = int(state.get("generated", 0)), int(state.get("stale", 0))
