"""What scorers return besides the score, read as numbers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hpcrl.runtime.exits import InputError


def numbers_of(
    samples: Mapping[str, np.ndarray], key: str, setting: str, missing: float = 0.0, required: bool = True
) -> np.ndarray:
    """float64 (N,): `score`, or what the scorer returned under `key`; `missing` where a sample has no such number, for
    example because its scoring failed.

    InputError where no sample has one and that is `required`; `setting` is what names the key in the template.
    """
    if key == "score":
        return samples["score"].astype(np.float64)
    extras = samples["extras"].tolist()
    found = [extra.get(key) for extra in extras]
    is_number = [isinstance(value, (int, float)) and value == value for value in found]
    if required and not any(is_number):
        seen = sorted({name for extra in extras for name in extra})
        raise InputError(
            f"{setting} names {key!r}, and no sample has a number of that name; the scorer returns "
            f"{', '.join(['score', *seen])}"
        )
    return np.array([value if number else missing for value, number in zip(found, is_number, strict=True)], np.float64)
