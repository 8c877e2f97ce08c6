"""How products are computed: the switches of torch, CUDA's libraries and NCCL, in one place.

The dtype of weights and activations is `model.dtype`; log-probs, losses, gradients' sums and the optimizer's state are
fp32 whatever it is.
"""

from __future__ import annotations

import os


def settle_libraries(full_determinism: bool) -> None:
    """Environment that the libraries read when they start: to be called before torch starts CUDA."""
    if full_determinism:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # of Transformer Engine


def settle_torch(full_determinism: bool) -> None:
    """fp32 products are of fp32 numbers, not of TF32's ten bits, and bf16 products are summed in fp32; with
    `full_determinism` a kernel that may add in another order each time is an error. On the CPU all hold anyway."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if full_determinism and torch.cuda.is_available():
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
