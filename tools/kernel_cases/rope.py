from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import torch
from kernel_cases.case import Case

from hpcrl.kernels.layers import apply_rope
from hpcrl.model.blocks.rope import Rope
from hpcrl.model.blocks.rope_angles import rope_cos_sin

TOKENS, GROUPS, QUERIES, HEAD_DIM, THETA = 32768, 8, 4, 128, 1e6


def eager(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def peers(x: torch.Tensor, positions: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Libraries that turn heads (tokens, heads, head_dim) without gaps; some in place, some by angles in bf16, which is
    less to read."""
    runs: dict[str, Callable[[], object]] = {}
    cos, sin = (part.to(x.dtype) for part in rope_cos_sin(positions, Rope(HEAD_DIM, THETA)))
    if importlib.util.find_spec("flash_attn"):
        from flash_attn.layers.rotary import apply_rotary_emb

        runs["flash_attn"] = lambda: apply_rotary_emb(x[None], cos, sin)
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers.rope import liger_rotary_pos_emb

        queries, keys = x[None].transpose(1, 2).split([GROUPS * QUERIES, GROUPS], 1)
        queries, keys = (part.transpose(1, 2).contiguous().transpose(1, 2) for part in (queries, keys))
        doubled = [torch.cat((part, part), -1)[None] for part in (cos, sin)]
        runs["liger_kernel"] = lambda: liger_rotary_pos_emb(queries, keys, *doubled)
    if importlib.util.find_spec("transformer_engine"):
        from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

        powers = torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM
        angles = (positions[:, None] / THETA**powers).repeat(1, 2)[:, None, None]
        runs["te"] = lambda: apply_rotary_pos_emb(x[:, None], angles, tensor_format="sbhd", fused=True)
    return runs


def cases() -> Iterator[Case]:
    """Queries and keys of a layer: where they lie in a matrix of queries, keys and values, as the native engine turns
    them, and by themselves, as training does."""
    positions = torch.arange(TOKENS, device="cuda") % 4096
    cos, sin = rope_cos_sin(positions, Rope(HEAD_DIM, THETA))
    mixed = torch.randn(TOKENS, GROUPS, QUERIES + 2, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    heads, compiled = mixed[:, :, :-1], torch.compile(eager)
    moved = 2 * heads.numel() * heads.itemsize + cos.nbytes + sin.nbytes
    wide = cos[:, None], sin[:, None]
    runs = {
        "hpcrl": lambda: apply_rope(heads, *wide),
        "torch eager": lambda: eager(heads, *wide),
        "torch.compile": lambda: compiled(heads, *wide),
    }
    yield Case("rope of heads in a mixed matrix", runs, moved)
    alone = heads.flatten(1, 2).clone()
    ours = {"hpcrl": apply_rope, "torch eager": eager, "torch.compile": compiled}
    runs = {name: lambda run=run: run(alone, cos, sin) for name, run in ours.items()}
    with torch.no_grad():
        yield Case("rope of heads alone", runs | peers(alone, positions), moved)
    leaf, grad = alone.requires_grad_(), torch.randn_like(alone)
    results = {name: run(leaf, cos, sin) for name, run in ours.items()}
    runs = {name: lambda y=y: torch.autograd.grad(y, leaf, grad, retain_graph=True) for name, y in results.items()}
    yield Case("rope backward", runs, moved)
