"""The native engine's decoder with kernels and without."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcrl.kernels import dispatch
from hpcrl.model.exact import TensorParallel
from hpcrl.model.shape import LatentAttention, ModelShape
from hpcrl.rollout.engines.engine import BLOCK_SIZE, CacheLayout
from hpcrl.rollout.engines.native.attention import NewTokens, PrefillAttention
from hpcrl.rollout.engines.native.decoder import Decoder
from hpcrl.rollout.engines.native.kv_cache import KVCache
from tests.rollout.small_model import SHAPE

LENGTHS = np.array([5, 1, 3])
SHAPES = {
    "dense": SHAPE,
    "normed heads, biases": replace(SHAPE, num_layers=1, qk_norm=True, qkv_bias=True),
    "experts": replace(
        SHAPE, num_layers=1, num_experts=4, moe_topk=2, moe_ffn_hidden_size=24, moe_shared_ffn_hidden_size=16
    ),
    "latent": replace(
        SHAPE,
        num_layers=1,
        head_dim=12,
        num_query_groups=4,
        mla=LatentAttention(q_lora_rank=16, kv_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8),
    ),
}


def run(shape: ModelShape, device: torch.device) -> Tensor:
    """Logits of three prompts."""
    torch.manual_seed(0)
    decoder = Decoder(shape, TensorParallel(None, 0, 1), torch.float32, device)
    for name, weight in decoder.weights.items():
        noise = torch.randn(weight.shape)
        weight.copy_(1 + 0.1 * noise if "norm" in name else 0.2 * noise)
    cache = KVCache(CacheLayout.of(shape, 1, 1 << 20), 8, BLOCK_SIZE, len(LENGTHS), torch.float32, device)
    rows = np.arange(len(LENGTHS))
    cache.pool.grow(rows, LENGTHS)
    new = NewTokens(cache, rows, np.zeros_like(LENGTHS), LENGTHS)
    return decoder.forward(torch.randint(shape.vocab_size, (LENGTHS.sum(),)).to(device), PrefillAttention(new))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_are_the_same(
    device: torch.device, shape: ModelShape, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", dispatch.__name__)
    dispatch._log_choice.cache_clear()
    with torch.no_grad():
        found = run(shape, device)
        for kernel in ("rms_norm", "add_rms_norm", "rope", "swiglu"):
            assert f"{kernel} on {device.type}, float32: Triton" in caplog.messages
        monkeypatch.setenv("HPCRL_KERNELS", "torch")
        expected = run(shape, device)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
