"""Groups of samples: those of one prompt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import torch

GroupIds: TypeAlias = torch.Tensor | np.ndarray | list[Any] | tuple[Any, ...]


def group_numbers(index: GroupIds, device: torch.device) -> torch.Tensor:
    """int64 (B,): 0, 1, ... in the order in which the ids of `index` (B,) first appear; equal ids, equal numbers.

    Ids are anything hashable: integers, strings, both mixed; tensors, of all ids or of one, count by their values.
    """
    ids: Iterable[Any] = index.tolist() if isinstance(index, torch.Tensor | np.ndarray) else index
    ids = (i.item() if isinstance(i, torch.Tensor | np.ndarray) else i for i in ids)
    numbers: dict[Any, int] = {}
    return torch.tensor([numbers.setdefault(i, len(numbers)) for i in ids], dtype=torch.int64, device=device)


def two_best(score: torch.Tensor, group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of each group's highest and second highest score, int64 (G,) both; the same row in a group of one.

    Of equal scores the earlier row comes first.
    """
    by_score = torch.argsort(score, descending=True, stable=True)
    order = by_score[torch.argsort(group[by_score], stable=True)]
    size = torch.bincount(group)
    start = size.cumsum(0) - size
    return order[start], order[start + (size > 1)]
