"""Batches on which the metrics of a step's data are compared with verl's; see tools/record_cases.py."""

from __future__ import annotations

from typing import Any

import numpy as np

FORMAT = "json"
WIDTH, PROMPT = 7, 4


def _batch(seed: int, lengths: list[int], *, tool: bool = False, weights: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    size = len(lengths)
    response = (np.arange(WIDTH) < np.array(lengths)[:, None]).astype(np.int64)
    mask = response.copy()
    if tool:
        mask[0, 2:4] = 0
    last = np.maximum(np.array(lengths) - 1, 0)
    scores = np.zeros((size, WIDTH))
    scores[np.arange(size), last] = rng.normal(size=size) * (np.array(lengths) > 0)
    columns = {
        "token_level_scores": scores,
        "token_level_rewards": scores - 0.1 * rng.random((size, WIDTH)) * mask,
        **{name: rng.normal(size=(size, WIDTH)) for name in ("advantages", "returns", "values")},
        **{name: -rng.exponential(1.0, (size, WIDTH)) for name in ("old_log_probs", "rollout_log_probs")},
        "sum_pi_squared": rng.random((size, WIDTH)),
    }
    if weights:
        columns["rollout_is_weights"] = np.where(
            rng.random((size, WIDTH)) < 0.2, 0.0, rng.uniform(0.5, 2.0, (size, WIDTH))
        )
    found = {name: column.astype(np.float32) for name, column in columns.items()}
    return {**found, "response_mask": mask, "response": response, "prompt_length": rng.integers(1, PROMPT + 1, size)}


CASES: dict[str, dict[str, Any]] = {
    "mixed": {**_batch(1, [7, 3, 0, 1, 5], tool=True), "grad_norm": 0.3},
    "weights": {**_batch(2, [7, 7, 2, 6], weights=True), "grad_norm": 0.01},
    "all_full": {**_batch(3, [7, 7]), "grad_norm": 9.0},
    "no_norm": {**_batch(4, [4, 6, 2]), "grad_norm": None},
    "single": {**_batch(5, [5], weights=True), "grad_norm": 0.2},
}


def reference(name: str, inputs: dict[str, Any]) -> dict[str, float]:
    import torch
    from verl.protocol import DataProto
    from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_variance_proxy_metrics
    from verl.utils.debug.metrics import calculate_debug_metrics

    tensors = {key: torch.tensor(value) for key, value in inputs.items() if isinstance(value, np.ndarray)}
    response, prompt_length = tensors.pop("response"), tensors.pop("prompt_length")
    prompt = (torch.arange(PROMPT) >= PROMPT - prompt_length.unsqueeze(-1)).long()
    whole = {"prompts": prompt, "responses": response, "attention_mask": torch.cat([prompt, response], -1)}
    batch = DataProto.from_dict(tensors={**tensors, **whole})
    return {
        **compute_data_metrics(batch, use_critic=True),
        **compute_variance_proxy_metrics(batch, gradient_norm=inputs["grad_norm"]),
        **calculate_debug_metrics(batch),
    }
