"""What policy losses are configured by: verl's keys below `actor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hpcrl.algorithms.config_keys import expect_numbers, flat_config
from hpcrl.algorithms.rollout_correction.presets import preset
from hpcrl.algorithms.rollout_correction.settings import RolloutCorrection

# the actor's other keys, verl's and hpcrl's, so that a whole `actor` section can be given
OTHER_KEYS = frozenset(
    """calculate_entropy calculate_sum_pi_squared checkpoint data_loader_seed engine entropy_checkpointing
    entropy_coeff entropy_from_logits_chunk_size entropy_from_logits_with_chunking freeze_vision_tower fsdp_config
    grad_clip grad_offload kl_loss_coef kl_loss_type loss_agg_mode megatron model_config optim optimizer_offload
    pad_to_length param_offload policy_loss.loss_mode ppo_epochs
    ppo_infer_max_token_len_per_gpu ppo_infer_micro_batch_size_per_gpu ppo_max_token_len_per_gpu ppo_micro_batch_size
    ppo_micro_batch_size_per_gpu ppo_mini_batch_size profile profiler qat rollout_n router_replay separate_old_log_prob
    shuffle strategy torchtitan ulysses_sequence_parallel_size use_dynamic_bsz use_fused_kernels use_kl_loss
    use_prefix_grouper use_remove_padding use_rollout_log_probs use_torch_compile veomni""".split()
)
CORRECTION = "policy_loss.rollout_correction"
PRESET = f"{CORRECTION}.preset"
BATCH_SCALE = "global_batch_info.loss_scale_factor"


@dataclass(frozen=True)
class PolicyLossConfig:
    """The numbers of all policy losses; each loss reads its own. Defaults are those of verl's YAML and dataclasses.

    Quirks of verl, kept: `clip_ratio_c`, where it is not given, is 20 for the dppo losses and 3 for the dual clip;
    verl's YAML and ActorConfig always give it, as 3. `ppo_kl_coef` is 0.1 by default, and 1 where it is null. Not kept:
    verl's ActorConfig has 0.2 for clip_ratio_low and clip_ratio_high, which leaves a `clip_ratio` alone without effect.
    """

    clip_ratio_low: float = 0.2  # the ratio is clipped below at 1 - this; dppo: bound of the divergence where A <= 0
    clip_ratio_high: float = 0.2  # the ratio is clipped above at 1 + this; dppo: bound of the divergence where A > 0
    clip_ratio_c: float | None = None  # dual clip: bound of the ratio where A < 0; dppo: bound of the weight
    tau_pos: float = 1.0  # sapo: temperature of the gate where A > 0
    tau_neg: float = 1.05  # sapo: temperature of the gate where A <= 0
    clip_cov_ratio: float = 0.0002  # clip_cov: share of the tokens that lose their gradient
    clip_cov_lb: float = 1.0  # clip_cov: only tokens with a covariance above this
    clip_cov_ub: float = 5.0  # clip_cov: only tokens with a covariance below this
    kl_cov_ratio: float = 0.0002  # kl_cov: share of the tokens that are penalised
    ppo_kl_coef: float = 0.1  # kl_cov: weight of the penalty
    dro_beta: float | None = None  # dro: weight of the squared log-ratio; required there
    loss_scale_factor: float | None = None  # divisor of seq-mean-token-sum-norm, tokens; null: the padded width
    dp_size: float = 1.0  # `policy_loss` multiplies the loss by this: frameworks that average gradients want it
    batch_num_tokens: float | None = None  # `policy_loss`: tokens of the mini-batch; null: those that it is given
    global_batch_size: float | None = None  # `policy_loss`: sequences of the mini-batch; null: those that it is given
    rollout_correction: RolloutCorrection = field(default_factory=RolloutCorrection)  # bypass_mode

    def __post_init__(self) -> None:
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rollout_correction"}
        expect_numbers((name, value) for name, value in numbers.items() if value is not None)
        for name in ("clip_ratio_low", "clip_ratio_high"):
            if not numbers[name] >= 0:
                raise ValueError(f"{name} is {numbers[name]}; expected 0 or more; verl's default is 0.2")
        for name in ("dp_size", "loss_scale_factor"):
            if numbers[name] is not None and not numbers[name] > 0:
                raise ValueError(f"{name} is {numbers[name]}; expected more than 0")

    def ratio_bound(self, default: float) -> float:
        """clip_ratio_c, or what the loss takes where it is not given."""
        return default if self.clip_ratio_c is None else self.clip_ratio_c

    @classmethod
    def from_mapping(cls, actor: Mapping[str, Any] | None) -> PolicyLossConfig:
        """The config from verl's keys below `actor`, nested or dotted ("policy_loss.clip_cov_ratio").

        Keys of the actor that no policy loss reads are passed over; another key is an error. A null is verl's
        fallback for that key; clip_ratio is that of clip_ratio_low and clip_ratio_high, which may be left out too.
        "policy_loss.rollout_correction" may be a `RolloutCorrection`, or begin with a `preset`.
        """
        known = [*PLACES, *CORRECTION_PLACES, CORRECTION, PRESET, "clip_ratio", BATCH_SCALE]
        given = flat_config(actor, "actor", known, OTHER_KEYS)
        if given.get(BATCH_SCALE) is not None:  # where verl's losses read it
            given["loss_scale_factor"] = given[BATCH_SCALE]
        clip_ratio = given.get("clip_ratio")
        if clip_ratio is not None:
            given = {"clip_ratio_low": None, "clip_ratio_high": None} | given
        fallbacks = {"clip_ratio_low": clip_ratio, "clip_ratio_high": clip_ratio, "ppo_kl_coef": 1.0}
        values = {PLACES[key]: value for key, value in given.items() if key in PLACES}
        values = {name: fallbacks.get(name) if value is None else value for name, value in values.items()}
        correction = {CORRECTION_PLACES[key]: value for key, value in given.items() if key in CORRECTION_PLACES}
        if given.get(PRESET) is not None:
            values["rollout_correction"] = preset(given[PRESET], **correction)
        else:
            values["rollout_correction"] = RolloutCorrection(**correction) if correction else given.get(CORRECTION)
        return cls(**{name: value for name, value in values.items() if value is not None})


FOLDERS = {  # of the fields that are not below policy_loss
    **dict.fromkeys(
        ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg", "loss_scale_factor"), ""
    ),
    **dict.fromkeys(("dp_size", "batch_num_tokens", "global_batch_size"), "global_batch_info."),
}
PLACES = {  # verl's key -> field
    FOLDERS.get(name, "policy_loss.") + name: name
    for name in (f.name for f in fields(PolicyLossConfig))
    if name != "rollout_correction"
}
CORRECTION_PLACES = {f"{CORRECTION}.{f.name}": f.name for f in fields(RolloutCorrection)}
