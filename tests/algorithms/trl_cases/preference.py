"""Log-probs of pairs and of labelled responses, and TRL's losses and gradients of them; see tools/record_cases.py.

`reference` calls the trainers' own methods on log-probs in place of a model's."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np

PAIRS, WIDTH = 6, 7
DPO = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard")
DPO += ("apo_zero", "apo_down", "discopop")


def _pairs(seed: int, dtype: str) -> dict[str, np.ndarray]:
    """Per-token log-probs, 0 outside of the responses, which start at different places: (2, PAIRS, WIDTH)."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, WIDTH + 1, (2, PAIRS, 1))
    mask = np.arange(WIDTH) < lengths
    policy = -rng.exponential(1.0, mask.shape) * mask
    ref = (policy + 0.5 * rng.normal(size=mask.shape)).clip(max=-1e-3) * mask
    return {"policy": policy.astype(dtype), "ref": ref.astype(dtype), "mask": mask.astype(np.int64)}


CASES: dict[str, dict[str, Any]] = {}
for _seed, _dtype in enumerate(("float64", "float32")):
    for _loss in DPO:
        for _beta in (0.1, 2.0):
            CASES[f"dpo {_loss} {_beta} {_dtype}"] = {
                **_pairs(_seed, _dtype),
                "loss_type": _loss,
                "beta": _beta,
                "label_smoothing": 0.1 if _loss in ("robust", "exo_pair") else 0.0,
            }
    for _loss, _smoothing, _alpha in (
        ("sigmoid", 0.0, 1.0),
        ("sigmoid", 0.2, 0.5),
        ("simpo", 0.0, 0.0),
        ("simpo", 0.1, 1.0),
    ):
        CASES[f"cpo {_loss} {_smoothing} {_alpha} {_dtype}"] = {
            **_pairs(10 + _seed, _dtype),
            "loss_type": _loss,
            "beta": 0.5,
            "label_smoothing": _smoothing,
            "nll_weight": _alpha,
            "simpo_gamma": 0.7,
        }
    CASES[f"orpo {_dtype}"] = {**_pairs(20 + _seed, _dtype), "beta": 0.3, "nll_weight": 1.0}
    for _kl in (True, False):  # the estimate is above 0, or below and so clamped
        CASES[f"kto {_kl} {_dtype}"] = {
            **_pairs(30 + _seed, _dtype),
            "labels": np.array([1, 0, 0, 1, 1, 0]),
            "beta": 0.4,
            "desirable_weight": 1.5,
            "undesirable_weight": 0.5,
            "shift": 1.0 if _kl else -1.0,
        }


def _accelerator() -> SimpleNamespace:
    return SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)


def _trainer(**settings: Any) -> SimpleNamespace:
    """What `_compute_loss` of DPO's and KTO's trainers reads of them, with reference log-probs in the batch."""
    return SimpleNamespace(
        accelerator=_accelerator(),
        model=SimpleNamespace(training=True),
        precompute_ref_logps=True,
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )


def _outputs(log_probs: Any) -> Any:
    import torch

    zeros = torch.zeros_like(log_probs.detach())
    return SimpleNamespace(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


class _Model:
    """Gives the same log-probs for every input."""

    training = True

    def __init__(self, log_probs: Any) -> None:
        self.log_probs = log_probs

    def __call__(self, **_: Any) -> Any:
        return _outputs(self.log_probs)


def _dpo(inputs: dict[str, Any], policy: Any, ref: Any, mask: Any) -> Any:
    import torch
    from trl.trainer.dpo_trainer import DPOTrainer

    trainer = _trainer(
        args=SimpleNamespace(discopop_tau=0.05),
        beta=inputs["beta"],
        label_smoothing=inputs["label_smoothing"],
        loss_types=[inputs["loss_type"]],
        loss_weights=[1.0],
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        use_weighting=False,
    )
    ref_chosen, ref_rejected = ref.sum(-1)
    completion = torch.cat([torch.zeros(2 * PAIRS, 1, dtype=torch.int64), mask.flatten(0, 1)], 1)
    batch = {
        "input_ids": torch.ones_like(completion),
        "attention_mask": torch.ones_like(completion),
        "completion_mask": completion,
        "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
    }
    loss = DPOTrainer._compute_loss(trainer, _Model(policy.flatten(0, 1)), batch, False)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items() if "/" in name}


def _cpo(inputs: dict[str, Any], policy: Any, mask: Any) -> Any:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    trainer = SimpleNamespace(accelerator=_accelerator(), alpha=0.0, **_settings(inputs))
    sums = policy.sum(-1) / (mask.sum(-1) if inputs["loss_type"] == "simpo" else 1)
    losses, *_ = CPOTrainer.cpo_loss(trainer, *sums)
    return losses.mean() + inputs["nll_weight"] * _nll(policy, mask), {}


def _orpo(inputs: dict[str, Any], policy: Any, mask: Any) -> Any:
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    trainer = SimpleNamespace(accelerator=_accelerator(), beta=inputs["beta"])
    losses, *_ = ORPOTrainer.odds_ratio_loss(trainer, *(policy.sum(-1) / mask.sum(-1)))
    return inputs["nll_weight"] * _nll(policy, mask) - losses.mean(), {}


def _nll(policy: Any, mask: Any) -> Any:
    """Cross-entropy over the chosen tokens, as both trainers add it."""
    return -policy[0].sum() / mask[0].sum()


def _settings(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: inputs[name] for name in ("loss_type", "beta", "label_smoothing", "simpo_gamma")}


def _kto(inputs: dict[str, Any], policy: Any, ref: Any, mask: Any) -> Any:
    """The first half are the responses, the second those with other prompts, for the KL term."""
    import torch
    from trl.trainer.kto_trainer import KTOTrainer

    class Model(_Model):
        def __call__(self, **given: Any) -> Any:
            return _outputs(self.log_probs[int(given["input_ids"][0, 0])])

    trainer = _trainer(
        loss_type="kto",
        beta=inputs["beta"],
        desirable_weight=inputs["desirable_weight"],
        undesirable_weight=inputs["undesirable_weight"],
        calculate_KL=True,
    )
    trainer._compute_kl_logps = lambda model, batch: KTOTrainer._compute_kl_logps(trainer, model, batch)
    own, other = (torch.cat([torch.zeros(PAIRS, 1, dtype=torch.int64), half], 1) for half in mask)
    batch = {
        "input_ids": torch.zeros_like(own),
        "attention_mask": torch.ones_like(own),
        "completion_mask": own,
        "KL_input_ids": torch.ones_like(other),
        "KL_attention_mask": torch.ones_like(other),
        "KL_completion_mask": other,
        "label": torch.as_tensor(inputs["labels"]).bool(),
        "ref_logps": ref[0].sum(-1),
        "ref_KL_logps": ref[1].sum(-1) - inputs["shift"],
    }
    loss = KTOTrainer._compute_loss(trainer, Model(policy), batch, False)
    return loss, {"kl": trainer._metrics["train"]["kl"][-1]}


def reference(name: str, inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    """loss, a scalar; gradient with respect to `policy`; metrics."""
    import torch

    policy = torch.tensor(inputs["policy"], requires_grad=True)
    ref, mask = torch.tensor(inputs["ref"]), torch.tensor(inputs["mask"])
    trainer = name.split()[0]
    if trainer == "dpo":
        loss, metrics = _dpo(inputs, policy, ref, mask)
    elif trainer == "kto":
        loss, metrics = _kto(inputs, policy, ref, mask)
    else:
        loss, metrics = {"cpo": _cpo, "orpo": _orpo}[trainer](inputs, policy, mask)
    loss.backward()
    assert policy.grad is not None
    named = {key.replace("/", "_"): np.asarray(value) for key, value in metrics.items()}
    return {"loss": loss.detach().numpy(), "gradient": policy.grad.numpy(), **named}
