"""Model FLOPs utilisation (Chowdhery et al. 2022, arXiv:2204.02311, section 4.1): what a phase's matrix products need
at least, as a share of what its devices could have done in the seconds that the controller waited for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcrl.config.derive import Derived
from hpcrl.config.schema import Config
from hpcrl.model.shape import ModelShape
from hpcrl.model.sizes import forward_flops, training_flops


def mfu_metrics(
    config: Config,
    derived: Derived,
    shape: ModelShape,
    lengths: Sequence[int],
    num_responses: int,
    seconds: Mapping[str, float],
    peak: float,
) -> dict[str, float]:
    """verl's `perf/mfu/{actor,actor_infer,critic}`, of the phases that the step had.

    lengths: tokens of each sample; num_responses: response tokens of all. seconds: by `timing_s/<phase>`. peak: bf16
    operations per second of one device. Phases that run at the same time on other ranks are waited for one after the
    other, so only the first of them is told in full.
    """
    once = {"old_log_prob": forward_flops(shape, lengths, num_responses)}
    has_adapters = config.model.lora_rank > 0
    update = training_flops(shape, lengths, num_responses, has_adapters=has_adapters)
    once["update_actor"] = config.actor.ppo_epochs * update
    once["update_critic"] = derived.critic_ppo_epochs * training_flops(shape, lengths, 0)
    found = {}
    for phase, role, name in (
        ("old_log_prob", "actor", "actor_infer"),
        ("update_actor", "actor", "actor"),
        ("update_critic", "critic", "critic"),
    ):
        if f"timing_s/{phase}" in seconds and role in derived.roles:
            could = seconds[f"timing_s/{phase}"] * peak * len(derived.roles[role].ranks)
            found[f"perf/mfu/{name}"] = once[phase] / could
    return found
