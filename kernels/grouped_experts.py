"""A mixture of experts by grouped products: one launch for all experts, whose numbers of tokens the host does not read.

Training and rollout use the same functions. Not yet run on a GPU.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from hpcrl.kernels.dispatch import use_triton
from hpcrl.kernels.fp32_product import add_product, sums_in_fp32

ALIGNMENT = 16  # bytes, of the strides of a grouped product

log = logging.getLogger(__name__)


class Order:
    """The order by expert of n tokens with k experts each. A row is a token at one of its experts: R = n k rows.

    experts: int64 (R,), ascending, counted from the last expert if `is_reversed`. tokens: int64 (R,), of each row.
    rows: int64 (n, k), where each token's rows are. ends: int32 (E,), the end of each expert's rows.
    """

    def __init__(self, ids: Tensor, num_experts: int, is_reversed: bool = False) -> None:
        """ids: int64 (n, k)."""
        self.is_reversed = is_reversed
        flat = num_experts - 1 - ids.flatten() if is_reversed else ids.flatten()
        self.experts, order = flat.sort(stable=True)
        self.tokens = order if ids.size(1) == 1 else order // ids.size(1)
        self.rows = torch.empty_like(order).scatter_(0, order, _count_up(len(order), order)).view(ids.shape)
        self.ends = torch.searchsorted(self.experts, _count_up(num_experts, order), right=True, out_int32=True)

    @cached_property
    def counts(self) -> list[int]:
        """The number of rows of each expert. A host waits for them."""
        ends = self.ends.tolist()
        return [end - first for first, end in zip((0, *ends), ends, strict=False)]

    @cached_property
    def is_of_expert(self) -> Tensor:
        """Bool (R, E)."""
        return self.experts.unsqueeze(1) == _count_up(len(self.ends), self.experts)

    def gather(self, x: Tensor) -> Tensor:
        """(n, ...) of tokens -> (R, ...) of rows."""
        return _Gather.apply(x, self)

    def of_rows(self, numbers: Tensor) -> Tensor:
        """(n, k) of tokens -> (R,) of rows."""
        return numbers.new_zeros(len(self.tokens)).scatter(0, self.rows.flatten(), numbers.flatten())

    def sum(self, y: Tensor) -> Tensor:
        """(R, width) of rows -> (n, width) of tokens, the sums of their rows."""
        return _Sum.apply(y, self)


def _count_up(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return x.index_select(0, order.tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum_rows(grad, ctx.order), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return _sum_rows(y, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.order.tokens), None


def _sum_rows(y: Tensor, order: Order) -> Tensor:
    """Rounds each sum once. On a CPU it takes a sixth of the time of `y[order.rows].sum(1)`."""
    if order.rows.size(1) == 1 or not len(y):
        return y.index_select(0, order.rows.flatten())
    return embedding_bag(order.rows, y, mode="sum")


class ExpertWeights:
    """A matrix (m, k) of each expert.

    A grouped product reads them without a copy where they are at equal distances in one memory: in a stack, and from
    the last expert to the first in megatron's buffers.
    """

    def __init__(self, each: Sequence[Tensor]) -> None:
        self.each = tuple(each)
        self._stack = stacked([weight.detach() for weight in self.each])

    @property
    def is_reversed(self) -> bool:
        """Whether the last expert is first in memory."""
        return self._stack is not None and self._stack[1]

    @property
    def is_current(self) -> bool:
        """Whether no weight has been moved to other memory."""
        first = self.each[-1 if self.is_reversed else 0]
        return self._stack is None or self._stack[0].data_ptr() == first.data_ptr()

    @property
    def needs_host(self) -> bool:
        """Whether a host has to read how many rows each expert has."""
        return self._stack is None or not _has_grouped_product(self.each[0].device, self.each[0].dtype)

    def of(self, order: Order) -> Sequence[Tensor]:
        """Return the weights, in an order of experts."""
        return self.each[::-1] if order.is_reversed else self.each

    def stack(self, order: Order) -> Tensor | None:
        """Return a view (E, m, k) of the weights; None if their memory has another order."""
        return None if self._stack is None or self._stack[1] != order.is_reversed else self._stack[0]

    @cached_property
    def has_sums(self) -> bool:
        """Whether their gradients are added to fp32 sums, `main_grad`, in the backward pass."""
        is_fp32 = self.each[0].dtype is torch.float32 and hasattr(self.each[0], "main_grad")
        return is_fp32 or all(sums_in_fp32(weight) for weight in self.each)

    @cached_property
    def main_grads(self) -> Tensor | None:
        """Those sums, as `stack`."""
        found = stacked([weight.main_grad for weight in self.each])  # type: ignore[attr-defined]
        return None if found is None or found[1] != self.is_reversed else found[0]


def stacked(weights: Sequence[Tensor]) -> tuple[Tensor, bool] | None:
    """Return a view of all weights by their places in memory, and whether these are in reverse order; None if they are
    not at equal distances, or not aligned."""
    first, size = weights[0], weights[0].element_size()
    if len({weight.untyped_storage().data_ptr() for weight in weights}) > 1:
        return None
    places = [int(weight.storage_offset()) for weight in weights]
    distances = {later - earlier for earlier, later in zip(places, places[1:], strict=False)} or {-first.numel()}
    if len(distances) > 1 or not all(weight.is_contiguous() for weight in weights):
        return None
    (distance,) = distances
    if any(number * size % ALIGNMENT for number in (distance, first.stride(0), min(places))):
        return None
    return first.as_strided((len(weights), *first.shape), (abs(distance), *first.stride()), min(places)), distance < 0


def place_in_stack(weights: Sequence[torch.nn.Parameter]) -> None:
    """Move parameters into one memory, from the last to the first, as megatron's buffers have them."""
    stack = torch.stack([weight.detach() for weight in reversed(weights)])
    for weight, place in zip(reversed(weights), stack, strict=True):
        weight.data = place


def grouped_linear(
    weights: ExpertWeights, order: Order, *inputs: Tensor, operand: Callable[..., Tensor] | None = None
) -> Tensor:
    """Return the rows of a = operand(*inputs) (R, k), or of the only input, times their expert's matrix transposed:
    (R, m).

    2 R k m operations forward, and each of the two products in the backward pass as many. For it `inputs` are kept, and
    `operand` is computed again. Gradients of weights are added to fp32 sums, where megatron's linear layers do so.
    """
    if not torch.is_grad_enabled():
        return _product(inputs[0] if operand is None else operand(*inputs), weights, order)
    return _GroupedLinear.apply(weights, order, operand, len(inputs), *inputs, *weights.each)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weights: ExpertWeights, order: Order, operand: Callable[..., Tensor] | None, count: int, *tensors: Any
    ) -> Tensor:
        inputs = tensors[:count]
        ctx.weights, ctx.order, ctx.operand, ctx.count = weights, order, operand, count
        if operand is not None or any(ctx.needs_input_grad[4 + count :]):
            ctx.save_for_backward(*inputs)
        return _product(inputs[0] if operand is None else operand(*inputs), weights, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[4 : 4 + ctx.count]
        grad = grad.contiguous()  # the grouped product does not read expanded ones
        grad_a = _product(grad, ctx.weights, ctx.order, transposed=True) if any(needed) else None
        inputs, a = [], None
        if ctx.saved_tensors:
            inputs = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True)]
            with torch.enable_grad():
                a = inputs[0] if ctx.operand is None else ctx.operand(*inputs)
        of_inputs: list[Tensor | None] = [grad_a]
        if a is not None and ctx.operand is not None and grad_a is not None:
            found = iter(torch.autograd.grad(a, [x for x in inputs if x.requires_grad], grad_a))
            of_inputs = [next(found) if need else None for need in needed]
        del grad_a, inputs
        of_weights: Sequence[Tensor | None] = [None] * len(ctx.weights.each)
        if any(ctx.needs_input_grad[4 + ctx.count :]):
            assert a is not None
            of_weights = _weight_gradients(grad, a.detach(), ctx.weights, ctx.order)
        return None, None, None, None, *of_inputs, *of_weights


def _product(a: Tensor, weights: ExpertWeights, order: Order, *, transposed: bool = False) -> Tensor:
    """Return the rows of `a` (R, k) times their expert's matrix transposed, or of (R, m) times the matrix itself."""
    if (stack := _stack_for(a, weights, order)) is not None:
        return torch.nn.functional.grouped_mm(a, stack if transposed else stack.transpose(1, 2), offs=order.ends)
    parts = [
        part @ (weight if transposed else weight.t())
        for weight, part in zip(weights.of(order), a.split(order.counts), strict=True)
        if len(part)
    ]
    return torch.cat(parts) if parts else a.new_empty(0, weights.each[0].size(1 if transposed else 0))


def _weight_gradients(grad: Tensor, a: Tensor, weights: ExpertWeights, order: Order) -> Sequence[Tensor | None]:
    """Return grad^T a of each expert's rows of (R, m) and (R, k), in the order of `weights.each`; None for those that
    are added to an fp32 sum."""
    if weights.has_sums:
        _add_weight_gradients(grad, a, weights, order)
        return [_added(weight) for weight in weights.each]
    if _stack_for(a, weights, order) is not None:
        found = torch.nn.functional.grouped_mm(grad.t(), a, offs=order.ends).unbind()
    else:
        found = tuple(part.t() @ rows for part, rows in _by_expert(order, grad, a))
    return found[::-1] if order.is_reversed else found


def _add_weight_gradients(grad: Tensor, a: Tensor, weights: ExpertWeights, order: Order) -> None:
    """Add to the fp32 sums of gradients."""
    if _stack_for(a, weights, order) is not None and (sums := weights.main_grads) is not None:
        if use_triton("expert_gradients", a):
            from hpcrl.kernels.grouped_experts_triton import add_expert_gradients

            add_expert_gradients(sums, grad, a, order.ends)
        else:
            sums += torch.nn.functional.grouped_mm(grad.t(), a, offs=order.ends)
        return
    for weight, (part, rows) in zip(weights.of(order), _by_expert(order, grad, a), strict=True):
        if len(rows):
            add_product(weight.main_grad, part.t(), rows)  # type: ignore[attr-defined]


def _by_expert(order: Order, grad: Tensor, a: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(grad.split(order.counts), a.split(order.counts), strict=True)


def _added(weight: Any) -> Tensor | None:
    """Return what autograd gets for a weight whose gradient has been added to `weight.main_grad`."""
    weight.grad_added_to_main_grad = True
    # See `hpcrl.engine.data_parallel`; its numbers are ignored.
    return weight.new_empty(()).expand(weight.shape) if getattr(weight, "requires_some_grad", False) else None


def _stack_for(a: Tensor, weights: ExpertWeights, order: Order) -> Tensor | None:
    """Return the stack of weights if torch multiplies it in one launch. A CPU does not wait for numbers of rows, and
    its grouped product is no faster, and takes time for experts without rows."""
    if a.device.type == "cpu":
        return None
    stack = weights.stack(order) if _has_grouped_product(a.device, a.dtype) else None
    if stack is None:
        _warn_of_waits(a.device, a.dtype)
    return stack


@functools.cache
def _warn_of_waits(device: torch.device, dtype: torch.dtype) -> None:
    log.warning(
        "experts run one after the other, and the host waits for their numbers of tokens in each layer: on %s with %s "
        "torch has no grouped product, or the weights are not at equal distances in memory",
        device, dtype,
    )  # fmt: skip


@functools.cache
def _has_grouped_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has it: from 2.10 on, for bf16 on GPUs, and for fp32 too on CPUs."""
    a, b = torch.ones(16, 16, device=device, dtype=dtype), torch.ones(2, 16, 16, device=device, dtype=dtype)
    try:
        ends = torch.tensor([8, 16], dtype=torch.int32, device=device)
        found = torch.nn.functional.grouped_mm(a, b, offs=ends)
    except (AttributeError, TypeError, RuntimeError):
        return False
    return bool((found == 16).all())


class Biases:
    """A vector (m,) of each expert."""

    def __init__(self, each: Sequence[Tensor]) -> None:
        self.each = tuple(each)

    def add(self, y: Tensor, order: Order, scale: Tensor | None = None, *, counts: bool = True) -> Tensor:
        """Return `y` (R, m) plus the bias of each row's expert, times `scale` (R,). Without `counts` the sum is `y`,
        and the gradient as with it."""
        if not counts and not torch.is_grad_enabled():
            return y
        biases = torch.stack(self.each[::-1] if order.is_reversed else self.each)
        if not counts:
            biases = biases - biases.detach()
        # A product, whose gradient is one, too, and the same for any order of threads.
        of_expert = order.is_of_expert.to(y.dtype)
        if scale is not None:
            of_expert = of_expert * scale.unsqueeze(1).to(y.dtype)
        return torch.addmm(y, of_expert, biases)
