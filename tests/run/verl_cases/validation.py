"""Validation metrics: inputs, and how verl computes them."""

from __future__ import annotations

from typing import Any

import numpy as np

FORMAT = "json"


def _prompts(num_prompts: int, n: int, sources: int = 1) -> dict[str, Any]:
    count = num_prompts * n
    return {
        "sources": [f"source_{i // n % sources}" for i in range(count)],
        "uids": [f"prompt_{i // n}" for i in range(count)],
    }


def _cases() -> dict[str, dict[str, Any]]:
    draw = np.random.default_rng(5)
    reward = lambda count: [float(x) for x in draw.normal(size=count).astype(np.float32)]  # noqa: E731
    acc = lambda count: [float(x) for x in draw.integers(0, 2, count)]  # noqa: E731
    pred = lambda count: [str(x) for x in draw.integers(0, 3, count)]  # noqa: E731
    cases: dict[str, dict[str, Any]] = {
        "one sample each": {**_prompts(5, 1), "variables": {"reward": reward(5), "acc": acc(5)}},
        "two samples, no acc": {**_prompts(4, 2), "variables": {"reward": reward(8)}},
        "votes": {**_prompts(6, 8, 2), "variables": {"reward": reward(48), "acc": acc(48), "pred": pred(48)}},
        "thirteen samples": {**_prompts(3, 13), "variables": {"reward": reward(39), "pred": pred(39)}},
        "numeric preds": {**_prompts(3, 4), "variables": {"reward": reward(12), "pred": [float(p) for p in pred(12)]}},
        "all equal": {**_prompts(2, 4), "variables": {"reward": [1.0] * 8, "acc": [True] * 8, "pred": ["x"] * 8}},
    }
    # A key that only one source has, a pred that is missing once, and prompts with different numbers of samples.
    mixed = _prompts(5, 4, 2)
    mixed["variables"] = {
        "reward": reward(20),
        "format": [None if source == "source_1" else 0.5 * (i % 3) for i, source in enumerate(mixed["sources"])],
        "pred": [None if i == 5 else p for i, p in enumerate(pred(20))],
    }
    cases["gaps"] = mixed
    uneven = {"sources": ["a"] * 9, "uids": list("xxxxyyyzz")}
    cases["uneven"] = {**uneven, "variables": {"reward": reward(9), "acc": acc(9), "pred": pred(9)}}
    # Samples whose scoring failed: verl's trainer has no such sample, and knows only how many there should have been.
    failed = _prompts(4, 4, 2)
    lost = {1, 6, 12, 13, 14, 15}
    failed["variables"] = {
        "acc": [None if i in lost else x for i, x in enumerate(acc(16))],
        "pred": [None if i in lost else x for i, x in enumerate(pred(16))],
    }
    cases["failures"] = failed
    return cases


CASES = _cases()


def reference(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    from verl.trainer.ppo.metric_utils import process_validation_metrics
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    sources, uids, variables = inputs["sources"], inputs["uids"], inputs["variables"]
    expected: dict[tuple[str, str], int] | None = None
    if "acc" in variables:
        expected = {}
        for key in zip(sources, uids, strict=True):
            expected[key] = expected.get(key, 0) + 1
        kept = [i for i, acc in enumerate(variables["acc"]) if acc is not None]
        sources, uids = [sources[i] for i in kept], [uids[i] for i in kept]
        variables = {name: [values[i] for i in kept] for name, values in variables.items()}
    found = process_validation_metrics(sources, uids, variables, expected_acc_counts=expected)
    tags = PPOTrainer._val_metrics_update(None, sources, uids, variables, [], expected_acc_counts=expected)
    return {
        "found": {
            source: {variable: {k: float(v) for k, v in metrics.items()} for variable, metrics in variables.items()}
            for source, variables in found.items()
        },
        "tags": {tag: float(value) for tag, value in tags.items()},
    }
