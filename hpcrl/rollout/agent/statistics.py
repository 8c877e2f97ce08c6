"""What conversations were like: as metrics, as columns, and for scorers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcrl.algorithms.metrics import Max, Mean, Metric, Min, Sum
from hpcrl.rollout.agent.moderator import Moderator
from hpcrl.rollout.protocol import Trajectory

COUNTS = ("calls", "timeouts", "crashes", "errors", "rejected", "user_failures")


def tool_metrics(moderator: Moderator) -> dict[str, Metric]:
    """How calls went, and what tools measured."""
    found: dict[str, Metric] = {f"tools/{name}": Sum(float(moderator.counts[name])) for name in COUNTS}
    for name, values in moderator.tool_metrics.items():
        found[f"tools/{name}/mean"] = Mean(sum(values), float(len(values)))
    return found


def turn_metrics(trajectories: Sequence[Trajectory]) -> dict[str, Metric]:
    """Verl's `training/num_turns` (here: turns of the model) and `tool_call_counts`."""
    found: dict[str, Metric] = {}
    names = {"num_turns": "training/num_turns", "tool_call_counts": "tool_call_counts"}
    for name, column in turn_columns(trajectories).items():
        if len(column):
            found[f"{names[name]}/min"] = Min(float(column.min()))
            found[f"{names[name]}/max"] = Max(float(column.max()))
            found[f"{names[name]}/mean"] = Mean(float(column.sum()), float(len(column)))
    return found


def turn_columns(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """Per sample, int32 (N,): turns of the model, and calls of tools, those that failed too."""
    return {
        "num_turns": np.array([one.num_turns for one in trajectories], np.int32),
        "tool_call_counts": np.array([one.num_tool_calls for one in trajectories], np.int32),
    }


def turns_for_scorer(trajectory: Trajectory) -> dict[str, Any]:
    """What a scorer finds in `extra_info`, as verl's do: `num_turns`, and `turn_scores` of a simulated user."""
    return {"num_turns": trajectory.num_turns, "turn_scores": list(trajectory.turn_scores)}
