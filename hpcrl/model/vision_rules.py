"""Which jobs and which models take pictures. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpcrl.model.vision import tower_tensors
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from hpcrl.config.schema import Config
    from hpcrl.model.shape import ModelShape
    from hpcrl.model.vision import Vision


def check_vision(config: Config, vision: Vision) -> None:
    """Raise InputError if the job has settings that do not work with a vision tower."""
    train = vision.train != "none"
    unsupported = {
        "rollout.engine=tensorrt_llm with pictures is not supported; use native": (
            config.rollout.engine == "tensorrt_llm"
        ),
        "rollout.exact=true with pictures is not supported; use false": config.rollout.exact,
        f"model.vision.train={vision.train} with model.lora_rank={config.model.lora_rank}: adapters are all that is "
        "trained of a model with them; use none": train and config.model.lora_rank > 0,
        f"model.vision.train={vision.train} with async_training.mode=bounded_staleness is not supported: features of "
        "waiting prompts would be older than the weights; use one_step_off": (
            train and config.async_training.mode == "bounded_staleness"
        ),
        f"model.vision.train={vision.train} with model.recompute.granularity=full is not supported for a tower whose "
        "features join several layers; use selective": (
            train and vision.num_deepstack > 0 and config.model.recompute.granularity == "full"
        ),
    }
    for line, is_wanted in unsupported.items():
        if is_wanted:
            raise InputError(line)


def check_towers(policy: ModelShape, models: Mapping[str, ModelShape]) -> None:
    """Raise InputError for a model that cannot read the pictures of the policy. models: by config section."""
    expected = policy.vision
    if expected is None:
        return
    for section, shape in models.items():
        found = shape.vision
        if found is None:
            raise InputError(
                f"the model of {section} has no vision tower, and the policy's prompts have pictures; name a "
                f"vision-language model in {section}.model.path"
            )
        if expected.train == "none" and tower_tensors(found) != tower_tensors(expected):
            raise InputError(
                f"the vision tower of {section}.model differs from the policy's, whose features it would get with "
                "model.vision.train=none; use a model with the same tower"
            )
        if (found.patch_width, found.merge_size) != (expected.patch_width, expected.merge_size):
            raise InputError(
                f"{section}.model has {found.patch_width} numbers per patch and {found.merge_size}^2 patches per "
                f"token, the policy {expected.patch_width} and {expected.merge_size}^2; use a model with the same "
                "patches"
            )
