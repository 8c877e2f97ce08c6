"""The tokens of a prefill, with the features of pictures among them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from hpcrl.model.vision import Vision
from hpcrl.rollout.engines.native.decoder import TokenFeatures
from hpcrl.rollout.engines.native.scheduler import Sequence


@dataclass(frozen=True, eq=False)
class PrefillTokens:
    """Tokens to prefill. ids: int32 (n,). rope_positions: int64 (3, n), if any sequence has pictures. rows: int64 (F,),
    their placeholder tokens, ascending; features: fp32 (F, width)."""

    ids: np.ndarray
    rope_positions: np.ndarray | None = None
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    features: torch.Tensor | None = None
    hidden_size: int = 0

    @classmethod
    def of(cls, sequences: list[Sequence], starts: np.ndarray, vision: Vision | None) -> PrefillTokens:
        """The tokens of each sequence from its start on, int64 (sequences,), but the last."""
        pairs = list(zip(sequences, starts.tolist(), strict=True))
        ids = np.concatenate([sequence.token_ids()[start:-1] for sequence, start in pairs])
        if vision is None or not any(sequence.pictures for sequence in sequences):
            return cls(ids)
        positions = [sequence.rope_positions(vision)[:, start:-1] for sequence, start in pairs]
        rows, features, first = [], [], 0
        for sequence, start in pairs:
            for picture in sequence.pictures:
                places = picture.place.start - start + np.arange(len(picture.features))
                rows.append(first + places[places >= 0])
                features.append(picture.features[len(places) - len(rows[-1]) :])
            first += sequence.num_to_cache - start
        all_rows = np.concatenate(rows)
        return cls(ids, np.concatenate(positions, axis=1), all_rows, torch.cat(features), vision.hidden_size)

    def part(self, start: int, num: int) -> PrefillTokens:
        """The tokens [start, start + num)."""
        ids = self.ids[start : start + num]
        if self.rope_positions is None or self.features is None:
            return PrefillTokens(ids)
        first, last = np.searchsorted(self.rows, (start, start + num))
        positions, rows = self.rope_positions[:, start : start + num], self.rows[first:last] - start
        return PrefillTokens(ids, positions, rows, self.features[first:last], self.hidden_size)

    def token_features(self, dtype: torch.dtype, device: torch.device) -> TokenFeatures | None:
        """The features by layer, on `device`."""
        if self.features is None or not len(self.rows):
            return None
        values = self.features.to(device, dtype).split(self.hidden_size, dim=1)
        return TokenFeatures(torch.from_numpy(self.rows).to(device), values)
