"""Sampling in Triton: programs reduce chunks of the rows, then one program per row selects the chunk and draws inside
it.

Weights in a chunk are relative to its own maximum, so that the first kernel reads logits once. Chunks depend on ids
only, never on the number of rows: a row's token is the same in any batch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.random import philox_impl

from hpcrl.kernels.chips import Chip, chip_of
from hpcrl.kernels.sampling import ROUNDS as _ROUNDS
from hpcrl.kernels.sampling import Partials

NUMBERS = 128  # random numbers of a program, one per lane
ROUNDS = tl.constexpr(_ROUNDS)
CHUNK = 4096  # ids that a program reduces, and from which the token is drawn
WIDE = 4096  # ids per step of the search for a filter's bound
MAX_REGISTERS = 128  # of 16 warps' threads; by default the compiler may use 64 and spill
LOW_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # bits that are 0 in fp32, or all 1 in a rank


@triton.jit
def _scores(row, columns, vocab_size, temperature, WIDTH: tl.constexpr, SCALED: tl.constexpr):
    """fp32, -inf from vocab_size on. The mask uses the padded width, which keeps loads 128 bits wide."""
    x = tl.load(row + columns, mask=columns < WIDTH, other=float("-inf")).to(tl.float32)
    x = tl.where(columns < vocab_size, x, float("-inf"))
    if SCALED:
        x = tl.div_rn(x, temperature)
    return x


@triton.jit
def _ranks(row, columns, vocab_size, temperature, WIDTH: tl.constexpr, SCALED: tl.constexpr, LOW: tl.constexpr):
    """Return scores, and int32 that compare as they do. Those of 16-bit logits compare as the logits, in fewer bits."""
    if LOW == 0:
        scores = _scores(row, columns, vocab_size, temperature, WIDTH, SCALED)
        ordered = scores
    else:
        ordered = _scores(row, columns, vocab_size, temperature, WIDTH, False)
        scores = ordered
        if SCALED:
            scores = tl.div_rn(ordered, temperature)
    bits = tl.where(ordered == 0.0, 0.0, ordered).to(tl.int32, bitcast=True)  # -0 is 0
    return scores, (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> LOW


@triton.jit
def _base(maximum):
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def reduce_chunks(
    logits, maxima, sums, chunks, vocab_size, temperature, WIDTH: tl.constexpr, SCALED: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest score of each chunk, and the sum of exp(score - that)."""
    program = tl.program_id(0)
    row = (program // chunks).to(tl.int64)
    columns = program % chunks * CHUNK + tl.arange(0, CHUNK)
    scores = _scores(logits + row * WIDTH, columns, vocab_size, temperature, WIDTH, SCALED)
    maximum = tl.max(scores, 0)
    tl.store(maxima + program, maximum)
    tl.store(sums + program, tl.sum(tl.exp(scores - _base(maximum)).to(tl.float64), 0))


@triton.jit
def _masses_from(row, first, unit, base, vocab_size, temperature, WIDTH: tl.constexpr, SCALED: tl.constexpr,
                 LOW: tl.constexpr, COUNT: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Return how many ids rank first + unit or higher, first + 2 unit, first + 3 unit; or the sums of their weights."""
    one = tl.zeros((WIDE,), tl.int32 if COUNT else tl.float64)
    two = one
    three = one
    for start in range(0, WIDTH, WIDE):
        columns = start + tl.arange(0, WIDE)
        scores, ranks = _ranks(row, columns, vocab_size, temperature, WIDTH, SCALED, LOW)
        if COUNT:
            weights = tl.full((WIDE,), 1, tl.int32)
        else:
            weights = tl.exp(scores - base).to(tl.float64)
        one += tl.where(ranks >= (first + unit).to(tl.int32), weights, 0)
        two += tl.where(ranks >= (first + 2 * unit).to(tl.int32), weights, 0)
        three += tl.where(ranks >= (first + 3 * unit).to(tl.int32), weights, 0)
    return tl.sum(one, 0), tl.sum(two, 0), tl.sum(three, 0)


@triton.jit
def _around(row, bound, base, vocab_size, temperature, WIDTH: tl.constexpr, SCALED: tl.constexpr,
            LOW: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Return number and sum of weights of the ids that rank above `bound`, and the weight of one at `bound`."""
    count = tl.zeros((WIDE,), tl.int32)
    mass = tl.zeros((WIDE,), tl.float64)
    weight = tl.zeros((WIDE,), tl.float32)
    for start in range(0, WIDTH, WIDE):
        columns = start + tl.arange(0, WIDE)
        scores, ranks = _ranks(row, columns, vocab_size, temperature, WIDTH, SCALED, LOW)
        weights = tl.exp(scores - base)
        count += (ranks > bound).to(tl.int32)
        mass += tl.where(ranks > bound, weights, 0.0).to(tl.float64)
        weight = tl.where(ranks == bound, weights, weight)
    return tl.sum(count, 0), tl.sum(mass, 0), tl.max(weight, 0).to(tl.float64)


@triton.jit
def find_bounds(
    logits, maxima, bounds, quotas, kept_mass, before, chunks, vocab_size, temperature, top_k, WIDTH: tl.constexpr,
    SCALED: tl.constexpr, LOW: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Find what a filter keeps of a row: all ids that rank above its bound, and the first `quota` of those at the
    bound.

    The bound is built from its highest bits down, two at a time: the highest that enough ids, or enough mass, reach.

    Args:
        kept_mass: the mass of each chunk that is kept, relative to the row's maximum.
        before: how many ids before the chunk rank at the bound.
    """
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * WIDTH
    places = tl.arange(0, CHUNKS)
    base = _base(tl.max(tl.load(maxima + number * chunks + places, mask=places < chunks, other=float("-inf")), 0))
    DIGITS: tl.constexpr = (33 - LOW) // 2
    lowest = -(1 << (31 - LOW))
    bound = tl.full((), lowest, tl.int64)
    quota = tl.full((), 0, tl.int32)
    if TOP_K:
        for digit in range(DIGITS):
            unit = tl.full((), 1, tl.int64) << 2 * (DIGITS - 1 - digit)
            one, two, three = _masses_from(
                row, bound, unit, base, vocab_size, temperature, WIDTH, SCALED, LOW, True, WIDE
            )
            bound += unit * ((one >= top_k).to(tl.int64) + (two >= top_k) + (three >= top_k))
    higher, mass, weight = _around(row, bound.to(tl.int32), base, vocab_size, temperature, WIDTH, SCALED, LOW, WIDE)
    if TOP_K:
        quota = top_k - higher
    if TOP_P < 1:
        enough = tl.full((), TOP_P, tl.float64) * (mass + quota * weight)
        top = bound
        bound = tl.full((), lowest, tl.int64)
        for digit in range(DIGITS):
            unit = tl.full((), 1, tl.int64) << 2 * (DIGITS - 1 - digit)
            one, two, three = _masses_from(
                row, bound, unit, base, vocab_size, temperature, WIDTH, SCALED, LOW, False, WIDE
            )
            # what top-k drops ranks below `top`
            above = ((bound + unit <= top) | (one >= enough)).to(tl.int64)
            above += (bound + 2 * unit <= top) | (two >= enough)
            above += (bound + 3 * unit <= top) | (three >= enough)
            bound += unit * above
        _, mass, weight = _around(row, bound.to(tl.int32), base, vocab_size, temperature, WIDTH, SCALED, LOW, WIDE)
        limit = tl.full((), 0x7FFFFFFF, tl.int32)
        if TOP_K:
            limit = tl.where(bound == top, quota, limit)
        # Ids for which the mass before them is not enough; a weight of 0 gives inf, and is never drawn.
        quota = tl.minimum(tl.ceil((enough - mass) / weight), limit.to(tl.float64)).to(tl.int32)
    least = bound.to(tl.int32)
    tl.store(bounds + number, least)
    tl.store(quotas + number, quota)
    ties = tl.full((), 0, tl.int32)
    for chunk in range(chunks):
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        scores, ranks = _ranks(row, columns, vocab_size, temperature, WIDTH, SCALED, LOW)
        tied = (ranks == least).to(tl.int32)
        keep = (ranks > least) | ((tied > 0) & (ties + tl.cumsum(tied, 0) <= quota))
        weights = tl.where(keep, tl.exp(scores - base), 0.0)
        tl.store(kept_mass + number * chunks + chunk, tl.sum(weights.to(tl.float64), 0))
        tl.store(before + number * chunks + chunk, ties)
        ties += tl.sum(tied, 0)


@triton.jit
def _first(holds, possible, places):
    """Return the first of `places` that holds; if none does, by rounding or NaN, the last possible one."""
    first = tl.min(tl.where(holds & possible, places, 0x7FFFFFFF), 0)
    return tl.minimum(first, tl.max(tl.where(possible, places, 0), 0))


@triton.jit
def draw(
    logits, uniform, maxima, sums, bounds, quotas, kept_mass, before, token_ids, log_probs, chunks, vocab_size,
    temperature, WIDTH: tl.constexpr, SCALED: tl.constexpr, LOW: tl.constexpr, GREEDY: tl.constexpr,
    FILTERED: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Draw the token of a row and its log-prob, from the sums of the row's chunks."""
    number = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, CHUNKS)
    inside = places < chunks
    peaks = tl.load(maxima + number * chunks + places, mask=inside, other=float("-inf"))
    highest = tl.max(peaks, 0)
    base = _base(highest)
    masses = tl.load(sums + number * chunks + places, mask=inside, other=0.0) * tl.exp((peaks - base).to(tl.float64))
    total = tl.sum(masses, 0)
    u = tl.load(uniform + number)
    if GREEDY:
        chunk = _first(peaks == highest, inside, places)
    else:
        if FILTERED:
            masses = tl.load(kept_mass + number * chunks + places, mask=inside, other=0.0)
        ends = tl.cumsum(masses, 0)
        aim = u * tl.sum(masses, 0)
        chunk = _first(ends > aim, masses > 0, places)
        aim -= tl.sum(tl.where(places < chunk, masses, 0.0), 0)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    row = logits + number * WIDTH
    if FILTERED:
        scores, ranks = _ranks(row, columns, vocab_size, temperature, WIDTH, SCALED, LOW)
        least = tl.load(bounds + number)
        tied = (ranks == least).to(tl.int32)
        ties = tl.load(before + number * chunks + chunk) + tl.cumsum(tied, 0)
        keep = (ranks > least) | ((tied > 0) & (ties <= tl.load(quotas + number)))
        weights = tl.where(keep, tl.exp(scores - base), 0.0)
    else:
        scores = _scores(row, columns, vocab_size, temperature, WIDTH, SCALED)
    if GREEDY:
        token = _first(scores == highest, columns < vocab_size, columns)
    else:
        if not FILTERED:
            own = _base(tl.max(tl.where(places == chunk, peaks, float("-inf")), 0))
            aim = aim * tl.exp((base - own).to(tl.float64))
            weights = tl.exp(scores - own)
        token = _first(tl.cumsum(weights.to(tl.float64), 0) > aim, weights > 0, columns)
    score = tl.max(tl.where(columns == token, scores, float("-inf")), 0)
    tl.store(token_ids + number, token.to(tl.int64))
    tl.store(log_probs + number, ((score - highest).to(tl.float64) - tl.log(total)).to(tl.float32))


def _sizes(logits: Tensor, temperature: float) -> dict[str, Any]:
    return {"WIDTH": logits.size(1), "SCALED": temperature not in (0, 1), "CHUNK": CHUNK}


def bound_options(chip: Chip) -> dict[str, int]:
    """Return warps of `find_bounds`, and for NVIDIA its registers; Triton does not set those of AMD's."""
    return {"num_warps": 16} | ({"maxnreg": MAX_REGISTERS} if chip.vendor == "NVIDIA" else {})


def partials(logits: Tensor, vocab_size: int, temperature: float) -> Partials:
    """Return the partials of chunks of CHUNK ids."""
    logits = logits.contiguous()
    rows, chunks = len(logits), max(1, triton.cdiv(vocab_size, CHUNK))
    found = Partials(
        logits.new_empty(rows, chunks, dtype=torch.float32), logits.new_empty(rows, chunks, dtype=torch.float64)
    )
    if rows:
        reduce_chunks[(rows * chunks,)](
            logits, *found, chunks, vocab_size, float(temperature), **_sizes(logits, temperature), num_warps=4
        )
    return found


def sample(
    logits: Tensor,
    uniform: Tensor,
    vocab_size: int,
    temperature: float,
    top_k: int,
    top_p: float,
    chunk_sums: Partials | None,
) -> tuple[Tensor, Tensor]:
    logits = logits.contiguous()
    maxima, sums = chunk_sums or partials(logits, vocab_size, temperature)
    rows, chunks = maxima.shape
    token_ids, log_probs = uniform.new_empty(rows, dtype=torch.int64), uniform.new_empty(rows, dtype=torch.float32)
    bounded = 0 < top_k < vocab_size
    filtered = temperature != 0 and (bounded or top_p < 1)
    if not rows:
        return token_ids, log_probs
    sizes = _sizes(logits, temperature)
    sizes |= {"LOW": LOW_BITS[logits.dtype], "CHUNKS": triton.next_power_of_2(chunks)}
    bounds = quotas = before = token_ids  # unused without a filter
    kept_mass = sums
    if filtered:
        bounds, quotas = (token_ids.new_empty(rows, dtype=torch.int32) for _ in range(2))
        kept_mass, before = torch.empty_like(sums), torch.empty_like(sums, dtype=torch.int32)
        find_bounds[(rows,)](
            logits, maxima, bounds, quotas, kept_mass, before, chunks, vocab_size, float(temperature), top_k,
            TOP_K=bounded, TOP_P=float(top_p), WIDE=WIDE, **sizes, **bound_options(chip_of(logits.device)),
        )  # fmt: skip
    draw[(rows,)](
        logits, uniform, maxima, sums, bounds, quotas, kept_mass, before, token_ids, log_probs, chunks, vocab_size,
        float(temperature), GREEDY=temperature == 0, FILTERED=filtered, **sizes, num_warps=8,
    )  # fmt: skip
    return token_ids, log_probs


@triton.jit
def draw_uniforms(keys, positions, sample_indices, step, numbers, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    key_0 = tl.load(keys + place, mask=inside, other=0).to(tl.uint32, bitcast=True)
    key_1 = tl.load(keys + n + place, mask=inside, other=0).to(tl.uint32, bitcast=True)
    position = tl.load(positions + place, mask=inside, other=0).to(tl.uint32, bitcast=True)
    sample = tl.load(sample_indices + place, mask=inside, other=0).to(tl.uint32, bitcast=True)
    zero = tl.zeros((BLOCK,), tl.uint32)
    trainer_step = zero + tl.load(step).to(tl.uint32, bitcast=True)
    word, _, _, _ = philox_impl(position, sample, trainer_step, zero, key_0, key_1, ROUNDS)
    tl.store(numbers + place, (word.to(tl.float64) + 0.5) * (2.0**-32), mask=inside)


def uniforms(keys: Tensor, positions: Tensor, sample_indices: Tensor, step: Tensor) -> Tensor:
    n = len(positions)
    numbers = positions.new_empty(n, dtype=torch.float64)
    if n:
        draw_uniforms[(triton.cdiv(n, NUMBERS),)](keys, positions, sample_indices, step, numbers, n, NUMBERS)
    return numbers
