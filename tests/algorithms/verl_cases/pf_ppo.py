"""Scores, and the weights that verl's PF-PPO draws with."""

from __future__ import annotations

from typing import Any

import numpy as np

NOISE = np.random.default_rng(0).normal(0, 2, 9).astype(np.float32)
SCORES = {
    "noise": NOISE,
    "correct": (NOISE > 0).astype(np.float32),
    "equal": np.full(5, 0.5, np.float32),
    "zero": np.zeros(4, np.float32),
    "one": NOISE[:1],
}
METHODS = [("pow", 2.0), ("pow", 0.5), ("max_min", 2.0), ("max_random", 2.0)]
CASES = {
    f"{name}, {method} {power}": {"scores": scores, "method": method, "weight_pow": power}
    for name, scores in SCORES.items()
    for method, power in METHODS
}


def reference(name: str, inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    from unittest import mock

    import torch
    from verl import DataProto
    from verl.trainer.ppo import core_algos

    token_level_scores = torch.from_numpy(inputs["scores"])[:, None] * torch.tensor([[0.0, 1.0]])
    data = DataProto.from_single_dict({"token_level_scores": token_level_scores})
    seen: list[torch.Tensor] = []

    def draw(weights: torch.Tensor, count: int, replacement: bool) -> torch.Tensor:
        seen.append(weights)
        return torch.zeros(count, dtype=torch.int64)

    with mock.patch("torch.multinomial", draw):
        core_algos.compute_pf_ppo_reweight_data(data, inputs["method"], inputs["weight_pow"])
    return {"weights": seen[0].numpy()}
