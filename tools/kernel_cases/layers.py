"""Norms, rotations of heads and SwiGLU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import silu

from hpcrl.kernels import layers
from hpcrl.model.blocks.attention import Rope
from hpcrl.model.blocks.rope_angles import rope_cos_sin
from kernel_cases import Case

EPS = 1e-5
GROUPS, QUERIES, HEAD_DIM, THETA = 8, 4, 128, 1e6  # of rope


def rms_norm(rows: int = 65536, width: int = 4096) -> Iterator[Case]:
    x, other = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(width, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def eager(x: Tensor) -> Tensor:
        return functional.rms_norm(x, (width,), weight, EPS)

    def eager_sum(x: Tensor, total: Tensor) -> Tensor:
        total += x
        return eager(total)

    compiled, compiled_sum = torch.compile(eager), torch.compile(eager_sum)
    ours = {"hpcrl": lambda x: layers.rms_norm(x, weight, EPS), "torch eager": eager, "torch.compile": compiled}
    total = torch.zeros_like(x)
    with torch.no_grad():
        yield Case("rms_norm", {name: lambda run=run: run(x) for name, run in ours.items()}, 2 * x.nbytes)
        sums = {
            "hpcrl": lambda: layers.add_rms_norm(x, total, weight, EPS),
            "torch eager": lambda: eager_sum(x, total),
            "torch.compile": lambda: compiled_sum(x, total),
        }
        yield Case("add_rms_norm", sums, 4 * x.nbytes)
    leaf = x.detach().requires_grad_()
    results = {name: run(leaf) for name, run in ours.items()}
    yield Case(
        "rms_norm backward",
        {
            name: lambda y=y: torch.autograd.grad(y, (leaf, weight), other, retain_graph=True)
            for name, y in results.items()
        },
        3 * x.nbytes,
    )


def rotate_eagerly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def rope_peers(x: Tensor, positions: Tensor) -> dict[str, Callable[[], object]]:
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


def rope(tokens: int = 32768) -> Iterator[Case]:
    """Queries and keys of a layer: where they lie in a matrix of queries, keys and values, as the native engine turns
    them, and by themselves, as training does."""
    positions = torch.arange(tokens, device="cuda") % 4096
    cos, sin = rope_cos_sin(positions, Rope(HEAD_DIM, THETA))
    mixed = torch.randn(tokens, GROUPS, QUERIES + 2, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    heads, compiled = mixed[:, :, :-1], torch.compile(rotate_eagerly)
    moved = 2 * heads.numel() * heads.itemsize + cos.nbytes + sin.nbytes
    wide = cos[:, None], sin[:, None]
    runs = {
        "hpcrl": lambda: layers.apply_rope(heads, *wide),
        "torch eager": lambda: rotate_eagerly(heads, *wide),
        "torch.compile": lambda: compiled(heads, *wide),
    }
    yield Case("rope of heads in a mixed matrix", runs, moved)
    alone = heads.flatten(1, 2).clone()
    ours = {"hpcrl": layers.apply_rope, "torch eager": rotate_eagerly, "torch.compile": compiled}
    runs = {name: lambda run=run: run(alone, cos, sin) for name, run in ours.items()}
    with torch.no_grad():
        yield Case("rope of heads alone", runs | rope_peers(alone, positions), moved)
    leaf, grad = alone.requires_grad_(), torch.randn_like(alone)
    results = {name: run(leaf, cos, sin) for name, run in ours.items()}
    runs = {name: lambda y=y: torch.autograd.grad(y, leaf, grad, retain_graph=True) for name, y in results.items()}
    yield Case("rope backward", runs, moved)


def swiglu_eagerly(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return silu(gate) * up


def swiglu_runs() -> dict[str, Callable[[Tensor], Tensor]]:
    runs = {"hpcrl": layers.swiglu, "torch eager": swiglu_eagerly, "torch.compile": torch.compile(swiglu_eagerly)}
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        # It takes two matrices, which it copies where they are halves of one.
        runs["liger_kernel"] = lambda x: LigerSiLUMulFunction.apply(*x.chunk(2, -1))
    if importlib.util.find_spec("transformer_engine"):
        from transformer_engine.pytorch.ops import SwiGLU

        runs["te"] = SwiGLU()
    return runs


def swiglu(rows: int = 16384, widths: tuple[int, int] = (14336, 768)) -> Iterator[Case]:
    """Of a dense layer and of an expert."""
    for width in widths:
        height = rows * widths[0] // width
        x = torch.randn(height, 2 * width, device="cuda", dtype=torch.bfloat16)
        grad = torch.randn(height, width, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            runs = {name: lambda run=run, x=x: run(x) for name, run in swiglu_runs().items()}
            yield Case(f"swiglu {width}", runs, x.nbytes + grad.nbytes)
        leaf = x.requires_grad_()
        results = {name: run(leaf) for name, run in swiglu_runs().items()}
        # Liger's gradient takes the place of what it kept: its numbers are wrong from the second time on, its time not.
        runs = {
            name: lambda y=y, leaf=leaf, grad=grad: torch.autograd.grad(y, leaf, grad, retain_graph=True)
            for name, y in results.items()
        }
        yield Case(f"swiglu backward {width}", runs, 2 * x.nbytes + grad.nbytes)
