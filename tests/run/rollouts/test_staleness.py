"""Staleness metrics against a case by hand."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from hpcrl.run.rollouts.source import Counts, idle_metrics, staleness_metrics

SAMPLES = {"weight_version_min": np.array([3, 5, 4, 5]), "weight_version_max": np.array([5, 5, 5, 5])}


def test_staleness_counts_from_the_first_token_and_spans_to_the_last() -> None:
    found = staleness_metrics(SAMPLES, 5)
    assert found == {
        "training/off_policy/trajectory_staleness/mean": 0.75,
        "training/off_policy/trajectory_staleness/max": 2.0,
        "training/off_policy/trajectory_staleness/min": 0.0,
        "training/off_policy/trajectory_spans/mean": 0.75,
        "training/off_policy/trajectory_spans/max": 2.0,
        "training/off_policy/trajectory_spans/min": 0.0,
        "fully_async/partial/total_partial_num": 2.0,
        "fully_async/partial/partial_ratio": 0.5,
        "fully_async/partial/max_partial_span": 2.0,
    }


def test_counts_add_up_over_a_resume() -> None:
    counts = Counts()
    counts.add(SAMPLES, 5, 6)
    again = Counts(**asdict(counts))
    assert again.add(SAMPLES, 6, 4) == {
        "fully_async/count/total_generated_samples": 10.0,
        "fully_async/count/stale_samples_processed": 6.0,
        "fully_async/count/current_param_version": 6.0,
    }


def test_idle_shares() -> None:
    assert idle_metrics(waited=1.0, busy=6.0, step=4.0, num_replicas=2) == {
        "fully_async/trainer/idle_ratio": 0.25,
        "fully_async/rollouter/idle_ratio": 0.25,
    }
