"""A student, a teacher and settings on which distillation is compared with verl's; see tools/record_cases.py."""

from __future__ import annotations

from typing import Any

import numpy as np

SIZE, WIDTH, VOCAB, TOPK = 5, 6, 12, 4


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def _batch(seed: int, distance: float, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Logits of the student; the teacher's log-probs of the sampled ids and of its likeliest ones; an empty response,
    a tool's tokens in the middle, importance weights."""
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.standard_normal((SIZE, WIDTH, VOCAB))
    teacher = _log_softmax(logits + distance * rng.standard_normal(logits.shape))
    ids = rng.integers(0, VOCAB, (SIZE, WIDTH))
    topk_ids = np.argsort(-teacher, axis=-1)[..., :TOPK]
    mask = (np.arange(WIDTH) < np.array([WIDTH, 3, 0, 1, 5])[:, None]).astype(np.int64)
    mask[0, 2:4] = 0
    sampled = np.take_along_axis(_log_softmax(logits), ids[..., None], -1)[..., 0]
    floats = {
        "logits": logits,
        "teacher_log_prob": np.take_along_axis(teacher, ids[..., None], -1)[..., 0],
        "teacher_topk": np.take_along_axis(teacher, topk_ids, -1),
        "old_log_prob": sampled + 0.3 * rng.standard_normal(sampled.shape),
        "weights": rng.uniform(0.5, 2.0, sampled.shape),
    }
    return {
        **{name: column.astype(dtype) for name, column in floats.items()},
        "ids": ids,
        "topk_ids": topk_ids,
        "mask": mask,
    }


NEAR, FAR, EXACT = _batch(1, 0.3), _batch(2, 3.0), _batch(3, 1.0, "float64")
CLAMPED = {"loss_max_clamp": 0.4, "log_prob_min_clamp": -3.0}
GRADIENT = {"use_policy_gradient": True}
CASES: dict[str, dict[str, Any]] = {
    **{
        f"{mode}-{name}": {**batch, "config": {"loss_mode": mode, **extra}}
        for mode in ("kl", "abs", "mse", "k2", "low_var_kl", "k3", "forward_kl_topk")
        for name, batch, extra in (("near", NEAR, {}), ("far", FAR, {}), ("clamped", FAR, CLAMPED))
    },
    **{
        f"{mode}-gradient": {**FAR, "config": {"loss_mode": mode, **GRADIENT, **CLAMPED}}
        for mode in ("k1", "k3", "forward_kl_topk")
    },
    "k1-gradient_fp64": {**EXACT, "config": {"loss_mode": "k1", **GRADIENT}},
    "k3-fp64": {**EXACT, "config": {"loss_mode": "k3"}},
}


def reference(name: str, inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    """Loss (token-mean), its gradient for the logits, and the metrics as sorted names and their values."""
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from verl.trainer.distillation import losses
    from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk
    from verl.workers.config import DistillationConfig, DistillationLossConfig

    tensors = {key: torch.tensor(value) for key, value in inputs.items() if key != "config"}
    # verl's dataclass has other defaults than its YAML
    yaml = {"topk": TOPK, "loss_max_clamp": None, "log_prob_min_clamp": None, "use_policy_gradient": False}
    config = DistillationConfig(distillation_loss=DistillationLossConfig(**{**yaml, **inputs["config"]}))
    logits = tensors["logits"].requires_grad_()
    log_probs = torch.log_softmax(logits, -1).gather(-1, tensors["ids"].unsqueeze(-1)).squeeze(-1)
    output = {"log_probs": log_probs}
    data = {
        "response_mask": tensors["mask"],
        "teacher_logprobs": tensors["teacher_log_prob"].unsqueeze(-1),
        "old_log_probs": tensors["old_log_prob"],
        "rollout_is_weights": tensors["weights"],
        "dp_size": 1,
        "batch_num_tokens": int(inputs["mask"].sum()),
        "global_batch_size": SIZE,
    }
    if config.distillation_loss.loss_mode == "forward_kl_topk":
        nested = [
            torch.nested.as_nested_tensor(list(tensors[k]), layout=torch.jagged) for k in ("teacher_topk", "topk_ids")
        ]
        found = compute_forward_kl_topk(logits.reshape(1, -1, VOCAB), *nested, config=config, data_format="thd")
        output |= {key: value.reshape(SIZE, WIDTH) for key, value in found.items()}
    actor = SimpleNamespace(loss_agg_mode="token-mean", global_batch_info={}, loss_scale_factor=None)
    with mock.patch.object(losses, "no_padding_2_padding", lambda tensor, data: tensor):
        loss, metrics = losses.distillation_loss(actor, config, output, data)
    loss.backward()
    names = sorted(metrics)
    values = [float(getattr(metrics[key], "aggregate", lambda key=key: metrics[key])()) for key in names]
    return {
        "loss": loss.detach().numpy(),
        "grad": logits.grad.numpy(),
        "metric_names": np.array(names),
        "metrics": np.array(values),
    }
