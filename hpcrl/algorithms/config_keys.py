"""A mapping of verl's keys, as the public functions take it, to flat names."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hpcrl.algorithms.registry import UnknownName


def flat_config(
    config: Mapping[str, Any] | None, section: str, known: Collection[str], passed_over: Collection[str] = ()
) -> dict[str, Any]:
    """Dotted key -> value of a mapping that may be nested, dotted or both, with or without `section.` in front.

    known: every dotted key of the section; another one is an error. A subsection that is None (`filter_groups: null`)
    says nothing, so it is left out. passed_over: keys and subsections that are known and of no interest.
    """
    prefix = f"{section}."
    subsections = {key.rsplit(".", 1)[0] for key in known if "." in key}
    flat: dict[str, Any] = {}
    for dotted, value in _leaves(config or {}):
        key = dotted.removeprefix(prefix)
        if any(f"{key}.".startswith(f"{other}.") for other in passed_over):
            continue
        if key in subsections and value is None:
            continue
        if key not in known:
            near = difflib.get_close_matches(key, [*known, *passed_over], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
            raise UnknownName(f"unknown key {dotted!r} in {section}; {hint}")
        flat[key] = value
    return flat


def _leaves(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
