"""Head outputs of a model: log-probs, most likely tokens, values, scores; (R, ...), one row per output token.

Logits are (R, V / tp): this rank's columns, rank i of `group` holding the i-th block. Columns of ids >= vocab_size have
no token and probability 0. Every function is collective over `group`, whose ranks pass the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.batch.ragged import Ragged, to_device
from hpcrl.engine.microbatch import MicroBatch, OutputGather
from hpcrl.kernels.dispatch import use_triton
from hpcrl.kernels.linear_log_prob import HeadOutputs, linear_log_probs
from hpcrl.kernels.vocabulary import SplitSoftmax, vocab_parallel_topk_ids
from hpcrl.model.exact import exact_log_probs, exact_log_softmax, with_gradient_of

from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region  # isort: skip

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from hpcrl.model.gpt import PackedGPT


def vocab_parallel_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    group: ProcessGroup,
    vocab_size: int,
    temperature: float = 1.0,
    entropy: bool = False,
    sum_pi_squared: bool = False,
    exact: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return log softmax(logits / temperature) at the targets; on request also entropy and sum of squared
    probabilities.

    Returns log-probs (R, K), entropy -sum p log p (R,) and sum p^2 (R,), the last without a gradient; fp32, or fp64 if
    the logits are. Temperature 0 means 1: the log-prob of greedy decoding is defined under temperature 1.

    Args:
        targets: (R, K) int64 global ids; in a row, those after the first are distinct.
        exact: compute the bits of the native engine's exact mode, from the logits of the whole vocabulary on every
            rank.
    """
    if exact:
        whole = gather_from_tensor_model_parallel_region(logits, group)
        log_p = exact_log_softmax(whole, vocab_size, temperature)
        log_probs = log_p.gather(1, targets)
        if use_triton("exact_log_probs", whole):
            log_probs = with_gradient_of(log_probs, exact_log_probs(whole, targets, vocab_size, temperature))
        return (
            log_probs,
            -(log_p.exp() * log_p).sum(dim=1) if entropy else None,
            log_p.detach().mul(2).exp().sum(dim=1) if sum_pi_squared else None,
        )
    softmax = SplitSoftmax(group, vocab_size, temperature or 1.0)
    return _LogProbs.apply(logits, targets, softmax, entropy, sum_pi_squared)


class _LogProbs(torch.autograd.Function):
    """Keeps one tensor of the size of the logits for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, softmax: SplitSoftmax, entropy: bool, sum_pi_squared: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        sums, x = softmax.sums(logits, targets, entropy, sum_pi_squared)
        ctx.save_for_backward(x.sub_(sums.log_sum.unsqueeze(1)), targets, sums.entropies)
        ctx.softmax, ctx.width, ctx.dtype = softmax, logits.size(1), logits.dtype
        ctx.set_materialize_grads(False)
        if sums.squares is not None:
            ctx.mark_non_differentiable(sums.squares)
        return sums.log_probs, sums.entropies, sums.squares

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropies: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        log_p, targets, entropies = ctx.saved_tensors
        grad = ctx.softmax.gradient(log_p, targets, entropies, grad_log_probs, grad_entropies, ctx.width)
        return grad.to(ctx.dtype), None, None, None, None


Outputs = dict[str, Tensor]


def values(micro: MicroBatch, raw: Tensor) -> Outputs:
    return {"values": raw.squeeze(1)}


def scores(micro: MicroBatch, raw: Tensor) -> Outputs:
    return {"scores": raw.squeeze(1)}


def gather_outputs(micro: MicroBatch, outputs: Outputs, group: ProcessGroup) -> Outputs:
    """Gather the outputs of all tokens on every rank of a context-parallel group, in the micro-batch's order.

    A gradient goes to the rank that has the token.
    """
    if micro.output_gather is None or micro.num_outputs == 0:
        return outputs
    return {name: _GatherOutputs.apply(output, micro.output_gather, group) for name, output in outputs.items()}


class _GatherOutputs(torch.autograd.Function):
    """(own or 1 dummy, ...) on each rank -> (R, ...) on all; all ranks must use the result alike."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, output_gather: OutputGather, group: ProcessGroup) -> Tensor:
        ctx.own, ctx.size = output_gather.own, len(output)
        padded = output.new_zeros(output_gather.most, *output.shape[1:])
        padded[: len(output_gather.own)] = output[: len(output_gather.own)]
        parts = output.new_empty(group.size() * output_gather.most, *output.shape[1:])
        dist.all_gather_into_tensor(parts, padded, group=group)
        return parts.index_select(0, output_gather.order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        here = grad.new_zeros(ctx.size, *grad.shape[1:])
        here[: len(ctx.own)] = grad[ctx.own]
        return here, None, None


@dataclass(frozen=True)
class VocabularyOutputs:
    """Outputs of a language model from its hidden states (R, hidden); the vocabulary is split over the ranks of
    `group`. The logits of `chunk_rows` rows are in memory at a time; with None and in exact mode, those of all rows."""

    model: PackedGPT
    group: ProcessGroup
    vocab_size: int
    chunk_rows: int | None
    exact: bool

    def log_probs(
        self,
        micro: MicroBatch,
        hidden: Tensor,
        *,
        temperature: float,
        entropy: bool = False,
        sum_pi_squared: bool = False,
        topk_ids: Ragged | None = None,
    ) -> Outputs:
        """Log-probs of the response tokens, and of the k tokens `topk_ids` at each of their positions."""
        targets = micro.targets.unsqueeze(1)
        if topk_ids is not None:
            ids = torch.zeros_like(targets)  # for a dummy output
            if micro.num_outputs:
                (ids,) = to_device([torch.from_numpy(topk_ids.take(micro.rows).values)], targets.device)
                ids = ids.view(micro.num_outputs, -1).to(targets.dtype)
                ids = ids if micro.output_gather is None else micro.output_gather.own_of(ids)
            targets = torch.cat([targets, ids], dim=1)
        options = {"entropy": entropy, "sum_pi_squared": sum_pi_squared}
        rows = self._at(hidden, targets, k=targets.size(1) - 1, temperature=temperature, **options)
        outputs = {
            "log_probs": rows.log_probs[:, 0],
            "topk_log_probs": None if topk_ids is None else rows.log_probs[:, 1:],
            "entropy": rows.entropies,
            "sum_pi_squared": rows.squares,
            "own_topk_ids": rows.topk_ids,
        }
        return {name: output for name, output in outputs.items() if output is not None}

    def topk(self, micro: MicroBatch, hidden: Tensor, *, temperature: float, k: int) -> Outputs:
        """Log-probs of the response tokens and of the k most likely tokens at their positions."""
        found = self._at(hidden, micro.targets.unsqueeze(1), temperature=temperature, k=k)
        assert found.topk_ids is not None and found.topk_log_probs is not None
        return {
            "log_probs": found.log_probs[:, 0],
            "topk_log_probs": found.topk_log_probs,
            "topk_ids": found.topk_ids.to(torch.int32),
        }

    def _at(self, hidden: Tensor, targets: Tensor, *, k: int = 0, **options: Any) -> HeadOutputs:
        """Same as `linear_log_probs`."""
        options |= {"group": self.group, "vocab_size": self.vocab_size}
        if self.chunk_rows is not None and not self.exact:
            weight = self.model.output_weight()
            return linear_log_probs(hidden, weight, targets, chunk_rows=self.chunk_rows, k=k, **options)
        logits = self.model.logits(hidden)
        if not k:
            return HeadOutputs(*vocab_parallel_log_probs(logits, targets, exact=self.exact, **options))
        ids = vocab_parallel_topk_ids(logits, k, group=self.group, vocab_size=self.vocab_size)
        all_ids = torch.cat([targets, ids], dim=1)
        log_probs, entropies, squares = vocab_parallel_log_probs(logits, all_ids, exact=self.exact, **options)
        log_probs, at_topk = log_probs.tensor_split([targets.size(1)], dim=1)
        return HeadOutputs(log_probs, entropies, squares, ids, at_topk.detach())
