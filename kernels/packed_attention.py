"""Causal attention inside each of several consecutive sequences, by a library's FlashAttention (Dao 2023,
arXiv:2307.08691) if there is one."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from hpcrl.kernels.chips import chip_of
from hpcrl.kernels.dispatch import VARIABLE

MAX_WIDTH = 256  # of a head in FlashAttention

log = logging.getLogger(__name__)

# query, key and value, bounds, longest, scale, window -> output, as in `packed_attention`
Library = Callable[[Tensor, Tensor, Tensor, Tensor, int, float | None, int | None], Tensor]


class Sequences(NamedTuple):
    """N sequences of T tokens in total: `bounds` int32 (N + 1,) from 0 to T; the `longest`; and int64 (T,) each token's
    sequence number and position."""

    bounds: Tensor
    longest: int
    numbers: Tensor
    positions: Tensor

    @classmethod
    def of(cls, lengths: np.ndarray, device: torch.device) -> Sequences:
        """`lengths` int64 (N,)."""
        bounds = np.concatenate([[0], lengths.cumsum()])
        numbers = np.arange(len(lengths)).repeat(lengths)
        arrays = bounds.astype(np.int32), numbers, np.arange(bounds[-1]) - bounds[numbers]
        found = [torch.from_numpy(array).to(device) for array in arrays]
        return cls(found[0], int(lengths.max()), found[1], found[2])


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale q k) v over the tokens of the same sequence up to each query's own position, of these the
    last `window`; None: all.

    All are fp32, bf16 or fp16. The result is (T, heads, value_dim). Moves all of them once; about heads (key_dim +
    value_dim) operations per pair of tokens of a sequence, two and a half times as many backward.

    Not yet run with a library on a GPU. Without one, tokens are padded to the longest sequence.

    Args:
        query: (T, heads, key_dim).
        key: (T, KV heads, key_dim).
        value: (T, KV heads, value_dim), no wider.
        scale: None is 1 / sqrt(key_dim).
        sinks: (heads,), see `causal_attention`; libraries do not have them.
    """
    if sinks is None and is_fused(query):
        return by_library(query, key, value, sequences.bounds, sequences.longest, scale, window)
    width = value.size(-1)
    return _padded(query, key, _as_wide(value, key), sequences, scale, window, sinks)[..., :width]


def by_library(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """The same if `is_fused(query)`, without each token's number and position."""
    library, width = _library(), value.size(-1)
    assert library is not None
    return library(query, key, _as_wide(value, key), bounds, longest, scale, window)[..., :width]


def is_fused(query: Tensor) -> bool:
    """Whether a library supports such queries."""
    reason = _reason(os.environ.get(VARIABLE, "auto"), query.device.type, query.dtype, query.size(-1))
    return not reason


@functools.cache
def _reason(choice: str, device: str, dtype: torch.dtype, width: int) -> str:
    """Return why no library runs, empty if one does; logged once on GPUs."""
    if device != "cuda":
        return f"no library for {device}"
    reason = ""
    if choice == "torch":
        reason = f"{VARIABLE}=torch"
    elif dtype not in (torch.bfloat16, torch.float16):
        reason = f"no library for {dtype}"
    elif width > MAX_WIDTH or width % 8:
        reason = f"head width {width} is not a multiple of 8 up to {MAX_WIDTH}"
    elif not chip_of(torch.device(device)).flash_attention:
        reason = "libraries have no attention for the GPU, which is older than an A100 or MI200"
    elif _library() is None:
        reason = "neither torch 2.11 nor FlashAttention is installed"
    log.info("packed_attention on %s, %s: %s", device, dtype, f"padded, {reason}" if reason else "a library")
    return reason


@functools.cache
def _library() -> Library | None:
    """Return the function of FlashAttention 3 on Hopper, where it is installed; else torch's, from 2.11 on, the first
    version with a scale; else that of the package flash_attn."""
    if torch.cuda.is_available() and chip_of(torch.device("cuda")).flash_attention == 3:
        with contextlib.suppress(ImportError):
            return of_flash_attention(importlib.import_module("flash_attn_interface"))
    name = "torch.nn.attention.varlen"
    varlen_attn: Any = getattr(importlib.import_module(name), "varlen_attn", None) if find_spec(name) else None
    parameters = inspect.signature(varlen_attn).parameters if varlen_attn else {}
    if "window_size" in parameters:
        # Older versions accept fewer key heads than query heads without this argument.
        grouped = {"enable_gqa": True} if "enable_gqa" in parameters else {}

        def of_torch(
            q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float | None, window: int | None
        ) -> Tensor:
            sizes = bounds, bounds, longest, longest
            return varlen_attn(q, k, v, *sizes, scale=scale, window_size=_before(window, 0), **grouped)

        return of_torch
    try:
        return of_flash_attention(importlib.import_module("flash_attn"))
    except ImportError:
        return None


def of_flash_attention(package: Any) -> Library:
    """The function of `flash_attn`, FlashAttention 2, or of `flash_attn_interface`, FlashAttention 3. Both take the
    arguments that are used here by the same names; the first versions of FlashAttention 3 return the log-sum-exp too.
    """

    def attend(
        q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float | None, window: int | None
    ) -> Tensor:
        options: dict[str, Any] = {"deterministic": torch.are_deterministic_algorithms_enabled()}
        if window is not None:
            options["window_size"] = _before(window, 0)
        sizes = bounds, bounds, longest, longest
        result = package.flash_attn_varlen_func(q, k, v, *sizes, softmax_scale=scale, causal=True, **options)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output

    return attend


def _before(window: int | None, after: int) -> tuple[int, int]:
    """Return the keys that a query attends to before and after its own, -1 for all."""
    return (-1 if window is None else window - 1), after


def _as_wide(value: Tensor, key: Tensor) -> Tensor:
    """Fused attention has one width."""
    missing = key.size(-1) - value.size(-1)
    return pad(value, (0, missing)) if missing else value


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None = None,
    *,
    enable_gqa: bool = True,
) -> Tensor:
    """Attention of `query` (N, heads, L, d) to `key` and `value` (N, KV heads, L, d) up to each query's own position,
    of these the last `window`: (N, heads, L, d). A window takes products of at most window x 2 window numbers.

    Args:
        sinks: (heads,), the score of one more key whose value is 0 (Agarwal et al. 2025, arXiv:2508.10925, section
            2.3).
    """
    if sinks is not None:
        scale, width = scale or query.size(-1) ** -0.5, value.size(-1)
        with_sinks = add_sinks(query, key, value, sinks / scale)
        return _with_sinks(*with_sinks, scale, window, enable_gqa)[..., :width]
    length = query.size(2)
    if window is None or length <= window:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=enable_gqa)
    parts = []
    for first in range(0, length, window):
        last, lowest = min(first + window, length), max(0, first - window + 1)
        mask = window_mask(last - first, last - lowest, window, query.device)
        own = query[:, :, first:last], key[:, :, lowest:last], value[:, :, lowest:last]
        parts.append(scaled_dot_product_attention(*own, mask, scale=scale, enable_gqa=enable_gqa))
    return torch.cat(parts, 2)


def add_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add a dimension, in which queries (N, heads, L, d) have `sinks` (heads,), and a first key, which has 1 in it and
    0 elsewhere. Values, as wide as keys, are 0 there."""
    column = sinks.to(query.dtype).view(-1, 1, 1).expand(*query.shape[:-1], 1)
    first = torch.zeros_like(key[:, :, :1]), key.new_ones(*key.shape[:2], 1, 1)
    keys = torch.cat([torch.cat(first, -1), pad(key, (0, 1))], 2)
    return torch.cat([query, column], -1), keys, pad(value, (0, 1, 1, 0))


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, enable_gqa: bool
) -> Tensor:
    """`causal_attention` with one more key and value, the first, which all queries attend to."""
    length = query.size(2)
    if window is None or length <= window:
        query = pad(query, (0, 0, 1, 0))  # of the first key, so that the causal mask fits
        output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=enable_gqa)
        return output[:, :, 1:]
    parts = []
    for first in range(0, length, window):
        last, lowest = min(first + window, length), max(0, first - window + 1)
        mask = pad(window_mask(last - first, last - lowest, window, query.device), (1, 0), value=True)
        keys, values = (torch.cat([part[:, :, :1], part[:, :, lowest + 1 : last + 1]], 2) for part in (key, value))
        part_of = query[:, :, first:last], keys, values
        parts.append(scaled_dot_product_attention(*part_of, mask, scale=scale, enable_gqa=enable_gqa))
    return torch.cat(parts, 2)


def window_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return which keys the last `queries` tokens of a causal sequence attend to, bool (queries, keys)."""
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return mask if window is None else mask.triu(keys - queries - window + 1)


def _padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Padding is at the end, where the causal mask hides it from every token."""
    queries, keys, values = (_pad(part, sequences) for part in (query, key, value))
    outputs = causal_attention(queries, keys, values, scale, window, sinks)
    return outputs.transpose(1, 2)[sequences.numbers, sequences.positions]


def _pad(flat: Tensor, sequences: Sequences) -> Tensor:
    """(T, heads, width) -> (N, heads, longest, width)"""
    padded = flat.new_zeros((len(sequences.bounds) - 1, sequences.longest, *flat.shape[1:]))
    padded[sequences.numbers, sequences.positions] = flat
    return padded.transpose(1, 2)
