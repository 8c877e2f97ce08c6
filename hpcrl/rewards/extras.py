"""What scorers return besides the score, read as numbers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hpcrl.launch.exits import InputError


def extra_values(samples: Mapping[str, np.ndarray], key: str) -> np.ndarray | None:
    """float64 (N,): `score`, or what the scorer returned under `key`; 0 where a sample has no such number, for example
    because its scoring failed. None where no sample has one."""
    if key == "score":
        return samples["score"].astype(np.float64)
    found = [extras.get(key) for extras in samples["extras"].tolist()]
    is_number = [isinstance(value, (int, float)) and value == value for value in found]
    if not any(is_number):
        return None
    return np.array([value if number else 0.0 for value, number in zip(found, is_number, strict=True)], np.float64)


def require_extra(samples: Mapping[str, np.ndarray], key: str, setting: str) -> None:
    """Refuses a key that no sample has (InputError); `setting` is what names it in the template."""
    if extra_values(samples, key) is None:
        seen = sorted({name for extras in samples["extras"].tolist() for name in extras})
        raise InputError(
            f"{setting} names {key!r}, and no sample has a number of that name; the scorer returns "
            f"{', '.join(['score', *seen])}"
        )
