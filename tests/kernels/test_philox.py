from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcrl.kernels import sampling
from hpcrl.rollout.sampling import uniforms


def test_numbers_are_those_of_the_host_bit_for_bit(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    words = generator.integers(0, 2**32, (4, 300), np.uint32)
    words[:, :4] = np.array([0, 1, 2**31, 2**32 - 1], np.uint32)  # products beyond int64 among them
    logits = torch.zeros(1, device=device)
    for step in (0, 7, 2**32 - 1):
        expected = uniforms(words[:2].T, words[2], words[3], step)
        given = torch.from_numpy(words.view(np.int32)).to(device)
        number = torch.from_numpy(np.array([step], np.uint32).view(np.int32)).to(device)
        for choice in ("triton", "torch"):
            monkeypatch.setenv("HPCRL_KERNELS", choice)
            found = sampling.uniforms(given[:2], given[2], given[3], number, logits)
            assert found.cpu().numpy().tobytes() == expected.tobytes()
