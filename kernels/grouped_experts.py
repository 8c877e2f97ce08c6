"""A mixture of experts by grouped products: one launch for all experts, whose numbers of tokens the host does not read.

Training and rollout use the same functions. Not yet run on a GPU.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from hpcrl.kernels.chips import chip_of
from hpcrl.kernels.dispatch import FP8, use_triton
from hpcrl.kernels.fp8_matrix import Fp8Matrix, fp8_linear, quantize_rows
from hpcrl.kernels.fp32_product import add_product, sums_in_fp32
from hpcrl.kernels.onednn import multiply_into

ALIGNMENT = 16  # bytes, of the strides of a grouped product

log = logging.getLogger(__name__)


class Order:
    """The order by expert of n tokens with k experts each. A row is a token at one of its experts: R = n k rows.

    experts: int64 (R,), ascending, counted from the last expert if `is_reversed`. tokens: int64 (R,), of each row.
    index: int64 (R,), of each row in (n, k). rows: int64 (n, k), where each token's rows are. ends: int32 (E,), the end
    of each expert's rows.
    """

    def __init__(self, ids: Tensor, num_experts: int, is_reversed: bool = False) -> None:
        """Sort the rows by expert.

        Args:
            ids: int64 (n, k).
        """
        self.is_reversed = is_reversed
        flat = num_experts - 1 - ids.flatten() if is_reversed else ids.flatten()
        self.num_experts = num_experts
        self.experts, self.index = flat.sort(stable=True)
        self.tokens = self.index if ids.size(1) == 1 else self.index // ids.size(1)
        self.rows = torch.empty_like(flat).scatter_(0, self.index, _count_up(len(flat), flat)).view(ids.shape)

    @cached_property
    def ends(self) -> Tensor:
        experts = _count_up(self.num_experts, self.experts)
        return torch.searchsorted(self.experts, experts, right=True, out_int32=True)

    @cached_property
    def counts(self) -> list[int]:
        """The number of rows of each expert. A host waits for them."""
        counts: list[int] = torch.bincount(self.experts, minlength=self.num_experts).tolist()
        return counts

    @cached_property
    def is_of_expert(self) -> Tensor:
        """Bool (R, E)."""
        return self.experts.unsqueeze(1) == _count_up(self.num_experts, self.experts)

    def gather(self, x: Tensor) -> Tensor:
        """(n, ...) of tokens -> (R, ...) of rows."""
        return _Gather.apply(x, self)

    def of_rows(self, numbers: Tensor) -> Tensor:
        """(n, k) of tokens -> (R,) of rows."""
        return _OfRows.apply(numbers, self)

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


class _OfRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, numbers: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return numbers.flatten().index_select(0, order.index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows = ctx.order.rows
        return grad.index_select(0, rows.flatten()).view(rows.shape), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return _sum_rows(y, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.order.tokens), None


def _sum_rows(y: Tensor, order: Order) -> Tensor:
    """Sum the rows of each token, with one rounding. On a CPU in a sixth of the time of `y[order.rows].sum(1)`."""
    if order.rows.size(1) == 1 or not len(y):
        return y.index_select(0, order.rows.flatten())
    return embedding_bag(order.rows, y, mode="sum")


class ExpertWeights:
    """A matrix (m, k) of each expert; in rollout it may have 8 bits.

    A grouped product reads them without a copy where they are at equal distances in one memory: in a stack, and from
    the last expert to the first in megatron's buffers.
    """

    def __init__(self, each: Sequence[Any]) -> None:
        self.each = tuple(each)
        self.is_fp8 = isinstance(self.each[0], Fp8Matrix)
        self._stack = stacked([weight.numbers if self.is_fp8 else weight.detach() for weight in self.each])
        found = stacked([weight.scales.flatten() for weight in self.each], alignment=1) if self.is_fp8 else None
        self.scales = None if found is None else found[0]  # fp32 (E, m), as `stack`

    @property
    def is_reversed(self) -> bool:
        """Whether the last expert is first in memory."""
        return self._stack is not None and self._stack[1]

    @property
    def is_current(self) -> bool:
        """Whether no weight has been moved to other memory."""
        first = self.each[-1 if self.is_reversed else 0]
        return self._stack is None or self.is_fp8 or self._stack[0].data_ptr() == first.data_ptr()

    @property
    def needs_host(self) -> bool:
        """Whether a host has to read how many rows each expert has."""
        first = self.each[0]
        is_apart = first.device.type == "cpu" or self._stack is None
        return is_apart or not _has_grouped_product(first.device, first.dtype, is_fp8=self.is_fp8)

    def of(self, order: Order) -> Sequence[Any]:
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
        """The fp32 sums of gradients, as `stack`."""
        found = stacked([weight.main_grad for weight in self.each])  # type: ignore[attr-defined]
        return None if found is None or found[1] != self.is_reversed else found[0]


def stacked(weights: Sequence[Tensor], alignment: int = ALIGNMENT) -> tuple[Tensor, bool] | None:
    """Return a view of all weights by their places in memory, and whether these are in reverse order; None if they are
    not at equal distances, or these and their sizes are no multiples of `alignment` bytes."""
    first, size = weights[0], weights[0].element_size()
    if len({weight.untyped_storage()._cdata for weight in weights}) > 1:
        return None
    places = [int(weight.storage_offset()) for weight in weights]
    distances = {later - earlier for earlier, later in zip(places, places[1:], strict=False)} or {-first.numel()}
    if len(distances) > 1 or not all(weight.is_contiguous() for weight in weights):
        return None
    (distance,) = distances
    if any(number * size % alignment for number in (distance, *first.shape, min(places))):
        return None
    return first.as_strided((len(weights), *first.shape), (abs(distance), *first.stride()), min(places)), distance < 0


def place_in_stack(weights: Sequence[torch.nn.Parameter]) -> None:
    """Move parameters into one memory, from the last to the first, as megatron's buffers have them."""
    stack = torch.stack([weight.detach() for weight in reversed(weights)])
    for weight, place in zip(reversed(weights), stack, strict=True):
        weight.data = place


class Operand(NamedTuple):
    """The computation of the rows `a` of a grouped product from its inputs, which the backward pass repeats.

    The only input is `a` (R, k) itself; or with `gathers` x (n, k) of tokens, whose rows are gathered; or a row of `a`
    is computed from a row of each input by `function`.
    """

    gathers: bool = False
    function: Callable[..., Tensor] | None = None

    def rows(self, inputs: Sequence[Tensor], order: Order) -> Sequence[Tensor]:
        return [inputs[0].index_select(0, order.tokens)] if self.gathers else inputs

    def __call__(self, rows: Sequence[Tensor]) -> Tensor:
        return rows[0] if self.function is None else self.function(*rows)

    def backward(
        self, rows: Sequence[Tensor], needed: Sequence[bool], grad: Tensor | None
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """Return `a`, and the gradients of the rows that are needed, from that of `a`. Without `rows`, which only a
        function needs, there is no `a`."""
        if self.function is None:
            return (rows[0] if rows else None), [grad]
        leaves = [part.detach().requires_grad_(need) for part, need in zip(rows, needed, strict=True)]
        with torch.enable_grad():
            a = self.function(*leaves)
        gradients = iter(
            torch.autograd.grad(a, [leaf for leaf in leaves if leaf.requires_grad], grad) if any(needed) else ()
        )
        return a.detach(), [next(gradients) if need else None for need in needed]


ROWS, TOKENS = Operand(), Operand(gathers=True)


Multiply = Callable[[Tensor, Tensor], Tensor]  # (rows, k), (m, k) -> (rows, m)


def grouped_linear(
    weights: ExpertWeights,
    order: Order,
    *inputs: Tensor,
    operand: Operand = ROWS,
    multiply: Multiply | None = None,
) -> Tensor:
    """Return the rows of a (R, k), which is `operand` of the inputs, times their expert's matrix transposed: (R, m).

    2 R k m operations forward, and each of the two products in the backward pass as many. For it `inputs` are kept.
    Gradients of weights are added to fp32 sums, where megatron's linear layers do so.

    Args:
        multiply: computes the rows of each expert in the forward pass, one expert after the other.
    """
    product = _GroupedProduct(operand, weights, order)
    if not torch.is_grad_enabled():
        return product.forward(inputs, multiply)
    return _GroupedLinear.apply(product, multiply, len(inputs), *inputs, *weights.each)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: _GroupedProduct, multiply: Multiply | None, count: int, *tensors: Any) -> Tensor:
        inputs = tensors[:count]
        ctx.product, ctx.count = product, count
        if product.operand.function is not None or any(ctx.needs_input_grad[3 + count :]):
            ctx.save_for_backward(*inputs)
        return product.forward(inputs, multiply)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        needed, needs_weights = ctx.needs_input_grad[3 : 3 + ctx.count], any(ctx.needs_input_grad[3 + ctx.count :])
        gradients = ctx.product.backward(ctx.saved_tensors, needed, grad, needs_weights)
        return None, None, None, *gradients.inputs, *gradients.weights


class Gradients(NamedTuple):
    """Gradients of inputs, or None; and of weights in the order of `ExpertWeights.each`, or None for those that have
    been added to an fp32 sum or are not needed."""

    inputs: Sequence[Tensor | None]
    weights: Sequence[Tensor | None]


class _GroupedProduct(NamedTuple):
    """The rows of `operand` times the matrices of their experts."""

    operand: Operand
    weights: ExpertWeights
    order: Order

    def forward(self, inputs: Sequence[Tensor], multiply: Multiply | None) -> Tensor:
        """See `grouped_linear`."""
        operand, weights, order = self
        rows = operand.rows(inputs, order)
        if multiply is None and (stack := _stack_for(rows[0], weights, order)) is not None:
            a = operand(rows)
            if weights.is_fp8:
                return _fp8_product(a, stack, weights.scales, order.ends)  # type: ignore[arg-type]
            return torch.nn.functional.grouped_mm(a, stack.transpose(1, 2), offs=order.ends)
        if weights.is_fp8:
            multiply = fp8_linear
        product = rows[0].new_empty(len(rows[0]), len(weights.each[0]))
        for weight, part, *of_rows in _parts_by_expert(weights, order, product, *rows):
            if multiply is None:
                multiply_into(part, operand(of_rows), weight.t())
            else:
                part.copy_(multiply(operand(of_rows), weight))
        return product

    def backward(
        self, inputs: Sequence[Tensor], needed: Sequence[bool], grad: Tensor, needs_weights: bool
    ) -> Gradients:
        """Return the gradients from that of the product.

        Args:
            inputs: empty if the gradients do not need them.
        """
        grad = grad.contiguous()  # the grouped product does not read expanded ones
        rows = self.operand.rows(inputs, self.order) if inputs else ()
        stack = _stack_for(grad, self.weights, self.order)
        adds_apart = needs_weights and self.weights.has_sums and self.weights.main_grads is None
        if stack is None or adds_apart:
            gradients = self._by_expert(rows, needed, grad, needs_weights)
        else:
            gradients = self._at_once(rows, needed, grad, needs_weights, stack)
        if self.operand.gathers:
            return gradients._replace(
                inputs=[None if it is None else _sum_rows(it, self.order) for it in gradients.inputs]
            )
        return gradients

    def _at_once(
        self, rows: Sequence[Tensor], needed: Sequence[bool], grad: Tensor, needs_weights: bool, stack: Tensor
    ) -> Gradients:
        weights, order, grad_a = self.weights, self.order, None
        if any(needed):
            grad_a = torch.nn.functional.grouped_mm(grad, stack, offs=order.ends)
        a, of_rows = self.operand.backward(rows, needed, grad_a)
        del grad_a
        if not needs_weights:
            return Gradients(of_rows, [None] * len(weights.each))
        assert a is not None
        if not weights.has_sums:
            products = torch.nn.functional.grouped_mm(grad.t(), a, offs=order.ends).unbind()
            return Gradients(of_rows, products[::-1] if order.is_reversed else products)
        sums = weights.main_grads
        assert sums is not None
        if use_triton("expert_gradients", a):
            from hpcrl.kernels.grouped_experts_triton import add_expert_gradients

            add_expert_gradients(sums, grad, a, order.ends)
        else:
            sums += torch.nn.functional.grouped_mm(grad.t(), a, offs=order.ends)
        return Gradients(of_rows, [_added(weight) for weight in weights.each])

    def _by_expert(
        self, rows: Sequence[Tensor], needed: Sequence[bool], grad: Tensor, needs_weights: bool
    ) -> Gradients:
        """One expert after the other, so that a CPU's cache holds what is computed of its rows."""
        weights, order = self.weights, self.order
        of_rows = [torch.empty_like(part) if need else None for part, need in zip(rows, needed, strict=False)]
        if not rows:
            of_rows = [grad.new_empty(len(grad), weights.each[0].size(1)) if needed[0] else None]
        of_weights: dict[int, Tensor] = {}
        needed_rows = [part for part in of_rows if part is not None]
        for weight, part, *parts in _parts_by_expert(weights, order, grad, *needed_rows, *rows):
            targets, of_expert = parts[: len(needed_rows)], parts[len(needed_rows) :]
            a, gradients = self.operand.backward(of_expert, needed, part @ weight if needed_rows else None)
            for target, values in zip(targets, (values for values in gradients if values is not None), strict=True):
                target.copy_(values)
            if needs_weights and weights.has_sums:
                add_product(weight.main_grad, part.t(), a)  # type: ignore[attr-defined, arg-type]
            elif needs_weights:
                of_weights[id(weight)] = part.t() @ a  # type: ignore[operator]
        if not needs_weights:
            return Gradients(of_rows, [None] * len(weights.each))
        if weights.has_sums:
            return Gradients(of_rows, [_added(weight) for weight in weights.each])
        return Gradients(
            of_rows,
            [of_weights[id(it)] if id(it) in of_weights else torch.zeros_like(it) for it in weights.each],
        )


def _fp8_product(a: Tensor, stack: Tensor, scales: Tensor, ends: Tensor) -> Tensor:
    """Return the product of 8-bit numbers, of `a` bf16 (R, k) too, with `stack` FP8 (E, m, k) as bf16 (R, m)."""
    numbers, of_rows = quantize_rows(a)
    return torch._scaled_grouped_mm(
        numbers, stack.transpose(1, 2), of_rows.flatten(), scales, offs=ends, out_dtype=torch.bfloat16
    )


def _parts_by_expert(weights: ExpertWeights, order: Order, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the weight of each expert that has rows, and its rows of each tensor."""
    parts = zip(weights.of(order), *(tensor.split(order.counts) for tensor in tensors), strict=True)
    return (part for part, count in zip(parts, order.counts, strict=True) if count)


def _added(weight: Any) -> Tensor | None:
    """Return what autograd gets for a weight whose gradient has been added to `weight.main_grad`."""
    weight.grad_added_to_main_grad = True
    # See `hpcrl.engine.data_parallel`. Its numbers are ignored; expanded, because those of all experts exist at once.
    return weight.new_empty(()).expand(weight.shape) if getattr(weight, "requires_some_grad", False) else None


def _stack_for(a: Tensor, weights: ExpertWeights, order: Order) -> Tensor | None:
    """Return the stack of weights if torch multiplies it in one launch. A CPU does not wait for numbers of rows, and
    its grouped product is no faster, and takes time for experts without rows."""
    if a.device.type == "cpu" or not len(a):
        return None
    stack = weights.stack(order) if _has_grouped_product(a.device, a.dtype, is_fp8=weights.is_fp8) else None
    if stack is None:
        _warn_of_waits(a.device, a.dtype)
    return stack


@functools.cache
def _warn_of_waits(device: torch.device, dtype: torch.dtype) -> None:
    log.warning(
        "experts run one after the other on %s with %s, and the host waits for their numbers of tokens in each layer; "
        "a grouped product needs bfloat16, a Hopper or Blackwell GPU, widths that are multiples of 16 bytes, and "
        "weights at equal distances in memory (raise model.ddp.bucket_size if a bucket ends inside a layer)",
        device, dtype,
    )  # fmt: skip


@functools.cache
def _has_grouped_product(device: torch.device, dtype: torch.dtype, *, is_fp8: bool = False) -> bool:
    """Whether torch has a kernel: from 2.10 on, for bf16, on GPUs with a grouped product. For others torch multiplies
    one group after the other, and the host waits."""
    if device.type == "cuda" and (dtype is not torch.bfloat16 or not chip_of(device).grouped_product):
        return False
    a, b = torch.ones(16, 16, device=device, dtype=dtype), torch.ones(2, 16, 16, device=device, dtype=dtype)
    try:
        ends = torch.tensor([8, 16], dtype=torch.int32, device=device)
        if is_fp8:
            product = _fp8_product(a, b.to(FP8), torch.ones(2, 16, device=device), ends)
        else:
            product = torch.nn.functional.grouped_mm(a, b, offs=ends)
    except (AttributeError, NotImplementedError, TypeError, RuntimeError):
        return False
    return bool((product == 16).all())


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
