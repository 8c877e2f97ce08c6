"""Drawing tokens where each tensor-parallel rank has a part of the vocabulary, without gathering logits."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from hpcrl.kernels import sampling as kernels
from hpcrl.kernels.dispatch import use_triton
from hpcrl.rollout.native.decoder import TensorParallel
from hpcrl.rollout.protocol import SamplingParams
from hpcrl.rollout.sampling import Sampled, checked, sample


def sample_sharded(
    logits: Tensor, uniform: np.ndarray, vocab_size: int, sampling: SamplingParams, tp: TensorParallel
) -> Sampled:
    """`hpcrl.rollout.sampling.sample` of `logits` (n, padded vocabulary / tp), those of the ids from rank * width on.
    Collective; every rank gets the same.

    A rank tells two numbers a row, its largest score and its sum of weights, and the owner of the token two more. Their
    fp64 sums are combined in rank order, so the token is that of gathered logits unless u lies within 1e-6 of a
    boundary, as the fp32 exponentials are relative to other maxima. A filter needs all logits, and has them gathered,
    and so has what runs without kernels, whose bits do not depend on the layout then.
    """
    filtered = sampling.temperature != 0 and (sampling.top_k != -1 or sampling.top_p < 1)
    if tp.size == 1 or filtered or not use_triton("sampling", logits):
        return sample(tp.gather_columns(logits), uniform, vocab_size, sampling)
    first = tp.rank * logits.size(1)
    own_size = min(max(vocab_size - first, 0), logits.size(1))
    partials = kernels.partials(logits, own_size, sampling.temperature)
    told = tp.gather_columns(torch.stack([part.double() for part in partials.whole()], 1))
    maxima, sums = told.view(len(told), -1, 2).unbind(-1)
    highest = maxima.amax(1, keepdim=True)
    masses = sums * (maxima - highest.masked_fill(highest == -torch.inf, 0)).exp()
    ends = torch.stack(list(accumulate(masses.unbind(1))), 1)  # CUDA's cumsum is not deterministic
    bounds = torch.from_numpy(uniform).to(ends.device).unsqueeze(1) * ends[:, -1:]
    owns = maxima == highest if sampling.temperature == 0 else (ends > bounds) & (masses > 0)
    mine = owns.int().argmax(1) == tp.rank  # the first that owns
    before = ends[:, [tp.rank - 1]] if tp.rank else torch.zeros_like(bounds)
    share = (bounds - before).squeeze(1) / masses[:, tp.rank]
    share = torch.where(mine, share, 0.5).clamp_(0, 1 - 2**-53)
    token_ids, log_probs = kernels.sample(logits, share, own_size, sampling.temperature, partials=partials)
    log_probs = log_probs.double() + (masses[:, tp.rank] / ends[:, -1]).log()
    answer = torch.stack([(token_ids + first).double(), log_probs], 1).masked_fill_(~mine.unsqueeze(1), 0)
    answer = tp.sum(answer)
    return checked(Sampled(answer[:, 0].long(), answer[:, 1].float()))
