"""A mapping of verl's keys, as the public functions take it, to flat names."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from numbers import Real
from typing import Any

import torch

from hpcrl.algorithms.registry import UnknownName

# the sections of a whole config, verl's and ours, which hold nothing for the one that is read
SECTIONS = frozenset(
    """actor actor_rollout_ref algorithm async_training critic custom_reward_function data distillation generate
    global_profiler job model placement ray_kwargs ref reward reward_model rm rollout run sandbox_fusion score sft
    skip teacher trainer transfer_queue""".split()
)


def flat_config(
    config: Mapping[str, Any] | None, section: str, known: Collection[str], passed_over: Collection[str] = ()
) -> dict[str, Any]:
    """Dotted key -> value of a mapping that may be nested, dotted or both, with or without `section.` in front.

    What has a `model_dump` (pydantic) is asked for its mapping; anything else is a TypeError.
    known: every dotted key of the section; another one is an error. A subsection that is None (`filter_groups: null`)
    says nothing, so it is left out. passed_over: keys and subsections that are known and of no interest; so are
    `_target_`, and the other sections of a whole config, which has this section too.
    """
    leaves = dict(_leaves(_mapping({} if config is None else config, section)))
    fronts = (f"actor_rollout_ref.{section}.", f"{section}.")
    is_whole = any(dotted.startswith(fronts) for dotted in leaves)
    subsections = {key.rsplit(".", 1)[0] for key in known if "." in key}
    flat: dict[str, Any] = {}
    for dotted, value in leaves.items():
        if is_whole and not dotted.startswith(fronts) and dotted.split(".")[0] in SECTIONS:
            continue
        key = dotted.removeprefix("actor_rollout_ref.").removeprefix(f"{section}.")
        if key.split(".")[-1] == "_target_" or any(f"{key}.".startswith(f"{other}.") for other in passed_over):
            continue
        if key in subsections and value is None:
            continue
        if key not in known:
            near = difflib.get_close_matches(key, [*known, *passed_over], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
            raise UnknownName(f"unknown key {dotted!r} in {section}; {hint}")
        flat[key] = value
    return flat


def expect_numbers(values: Iterable[tuple[str, Any]]) -> None:
    """TypeError for the first (name, value) that is neither a number nor a tensor of one."""
    for name, value in values:
        single = isinstance(value, torch.Tensor) and value.numel() == 1
        if isinstance(value, bool) or not (single or isinstance(value, Real)):
            raise TypeError(f"{name} is {value!r}; expected a number")


def _mapping(config: Any, section: str) -> Mapping[str, Any]:
    config = config.model_dump() if hasattr(config, "model_dump") else config
    if not isinstance(config, Mapping):
        raise TypeError(f"the config is a {type(config).__name__}; expected a mapping of verl's keys of {section}")
    return config


def _leaves(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        inner = value.model_dump() if hasattr(value, "model_dump") else value
        if isinstance(inner, Mapping):
            yield from _leaves(inner, f"{path}{key}.")
        else:
            yield f"{path}{key}", inner
