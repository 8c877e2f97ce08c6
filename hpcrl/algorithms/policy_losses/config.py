"""What policy losses are configured by: verl's keys below `actor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hpcrl.algorithms.config_keys import flat_config
from hpcrl.algorithms.rollout_correction.correction import RolloutCorrection

# the actor's other keys, verl's and hpcrl's, so that a whole `actor` section can be given
OTHER_KEYS = frozenset(
    """_target_ calculate_entropy calculate_sum_pi_squared checkpoint data_loader_seed engine entropy_checkpointing
    entropy_coeff entropy_from_logits_chunk_size entropy_from_logits_with_chunking freeze_vision_tower fsdp_config
    global_batch_info grad_clip kl_loss_coef kl_loss_type loss_agg_mode megatron model_config optim pad_to_length
    policy_loss._target_ policy_loss.loss_mode policy_loss.rollout_correction._target_ ppo_epochs
    ppo_infer_max_token_len_per_gpu ppo_infer_micro_batch_size_per_gpu ppo_max_token_len_per_gpu ppo_micro_batch_size
    ppo_micro_batch_size_per_gpu ppo_mini_batch_size profile profiler qat rollout_n router_replay shuffle strategy
    torchtitan ulysses_sequence_parallel_size use_dynamic_bsz use_fused_kernels use_kl_loss use_prefix_grouper
    use_remove_padding use_rollout_log_probs use_torch_compile veomni""".split()
)
CORRECTION = "policy_loss.rollout_correction"


@dataclass(frozen=True)
class PolicyLossConfig:
    """The numbers of all policy losses; each loss reads its own. Defaults are those of verl's YAML and dataclasses.

    Quirks of verl, kept. `clip_ratio` stands in for a clip_ratio_low or clip_ratio_high that is null; alone it does
    nothing, because those two are 0.2 and not null by default. `clip_ratio_c` is 3 for the dppo losses too: the 20 in
    verl's code is never reached. `ppo_kl_coef` is 0.1 by default, and 1 where it is null.
    """

    clip_ratio_low: float = 0.2  # the ratio is clipped below at 1 - this; dppo: bound of the divergence where A <= 0
    clip_ratio_high: float = 0.2  # the ratio is clipped above at 1 + this; dppo: bound of the divergence where A > 0
    clip_ratio_c: float = 3.0  # dual clip: bound of the ratio where A < 0; dppo: bound of the weight
    tau_pos: float = 1.0  # sapo: temperature of the gate where A > 0
    tau_neg: float = 1.05  # sapo: temperature of the gate where A <= 0
    clip_cov_ratio: float = 0.0002  # clip_cov: share of the tokens that lose their gradient
    clip_cov_lb: float = 1.0  # clip_cov: only tokens with a covariance above this
    clip_cov_ub: float = 5.0  # clip_cov: only tokens with a covariance below this
    kl_cov_ratio: float = 0.0002  # kl_cov: share of the tokens that are penalised
    ppo_kl_coef: float = 0.1  # kl_cov: weight of the penalty
    dro_beta: float | None = None  # dro: weight of the squared log-ratio; required there
    loss_scale_factor: float | None = None  # divisor of seq-mean-token-sum-norm, tokens; null: the padded width
    rollout_correction: RolloutCorrection = field(default_factory=RolloutCorrection)  # bypass_mode

    @classmethod
    def from_mapping(cls, actor: Mapping[str, Any] | None) -> PolicyLossConfig:
        """The config from verl's keys below `actor`, nested or dotted ("policy_loss.clip_cov_ratio").

        Keys of the actor that no policy loss reads are passed over; another key is an error. A null is verl's
        fallback for that key. "policy_loss.rollout_correction" may be a `RolloutCorrection`.
        """
        given = flat_config(actor, "actor", [*PLACES, *CORRECTION_PLACES, CORRECTION, "clip_ratio"], OTHER_KEYS)
        clip_ratio = given.get("clip_ratio")
        fallbacks = {"clip_ratio_low": clip_ratio, "clip_ratio_high": clip_ratio, "ppo_kl_coef": 1.0}
        values = {PLACES[key]: value for key, value in given.items() if key in PLACES}
        values = {name: fallbacks.get(name) if value is None else value for name, value in values.items()}
        correction = {CORRECTION_PLACES[key]: value for key, value in given.items() if key in CORRECTION_PLACES}
        values["rollout_correction"] = RolloutCorrection(**correction) if correction else given.get(CORRECTION)
        return cls(**{name: value for name, value in values.items() if value is not None})


BELOW_ACTOR = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg", "loss_scale_factor")
PLACES = {  # verl's key -> field
    name if name in BELOW_ACTOR else f"policy_loss.{name}": name
    for name in (f.name for f in fields(PolicyLossConfig))
    if name != "rollout_correction"
}
CORRECTION_PLACES = {f"{CORRECTION}.{f.name}": f.name for f in fields(RolloutCorrection)}
