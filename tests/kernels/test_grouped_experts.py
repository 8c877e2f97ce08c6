from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hpcrl.kernels.grouped_experts import Experts, mixture
from hpcrl.kernels.layers import swiglu
from tests.kernels.close import assert_near

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXPERTS, HIDDEN, FFN, TOKENS, TOPK = 8, 32, 16, 11, 3


def weights_of_experts(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """In one tensor, fc2 before fc1 and the last expert first, as in megatron's buffers."""
    stack = torch.randn(EXPERTS, HIDDEN * FFN * 3 + 64, device=DEVICE).to(dtype).flip(0)
    fc2, fc1, _ = stack.split([HIDDEN * FFN, HIDDEN * FFN * 2, 64], dim=1)
    # The views keep the storage of `stack`, so that the list is in reverse order of the memory.
    return (
        [row.view(2 * FFN, HIDDEN) for row in reversed(fc1.unbind())],
        [row.view(HIDDEN, FFN) for row in reversed(fc2.unbind())],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_is_the_sum_of_each_tokens_experts(dtype: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(0)
    fc1, fc2 = weights_of_experts(dtype)
    sizes = (EXPERTS, 2 * FFN), (EXPERTS, HIDDEN)
    biases = [tuple(reversed((torch.randn(size, device=DEVICE).to(dtype) * has_bias).unbind())) for size in sizes]
    x, weights = torch.randn(TOKENS, HIDDEN, device=DEVICE).to(dtype), torch.rand(TOKENS, TOPK, device=DEVICE)
    ids = torch.rand(TOKENS, EXPERTS - 2, device=DEVICE).argsort(1)[:, :TOPK] + 1  # the first and the last have none
    expected = torch.zeros(TOKENS, HIDDEN, device=DEVICE, dtype=torch.float64)
    for token, (chosen, shares) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            inner = swiglu(x[[token]].double() @ fc1[expert].double().T + biases[0][expert].double())
            expected[token] += share * ((inner @ fc2[expert].double().T)[0] + biases[1][expert].double())
    for is_reversed in (True, False):
        lists = (fc1, fc2, *biases) if has_bias else (fc1, fc2)
        lists = lists if is_reversed else tuple(torch.stack(each).unbind() for each in lists)
        experts = Experts.of(*lists)
        if experts is None:
            pytest.skip(f"this torch has no grouped product of {dtype} on {DEVICE.type}")
        assert experts.is_reversed == is_reversed
        assert experts.fc1.untyped_storage().data_ptr() == lists[0][0].untyped_storage().data_ptr()
        assert_near(mixture(x, weights, ids, experts), expected, dtype, factor=3)


def test_weights_apart_are_not_copied() -> None:
    fc1, fc2 = weights_of_experts(torch.float32)
    assert Experts.of([weight.clone() for weight in fc1], fc2) is None
    assert Experts.of([fc1[1], fc1[0], *fc1[2:]], fc2) is None
