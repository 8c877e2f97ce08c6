"""The `torch.distributed` backend `mpi_host`: collectives and point-to-point over mpi4py.

Tensors on a device are copied through the host. With an MPI that has large counts (MPI-4, such as MPICH) messages have
no limit; with Open MPI 5 the limit is 2^31 - 1 elements.

A Python `ProcessGroup` with one communicator per group. `torch.distributed` calls its methods by the names of the
installed torch: `_allgather_base` and similar names up to 2.9, `all_gather_single` and similar ones in 2.13; both are
here. Collectives complete inside the call; only sends and receives are pending until their Work is waited for.
Everything must be called from the one thread that calls MPI.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.distributed import ReduceOp

from hpcrl.runtime.accelerator import host_bytes
from hpcrl.runtime.mpi import create_group, duplicate, wait, wait_for_ranks

Spec = list  # [array, count or counts, MPI.Datatype], what mpi4py takes for a buffer

# Types of messages that are not reduced, by bytes per element. Counts of elements, not bytes, stay below 2^31 longer.
_CARRIERS = {1: MPI.BYTE, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T, 16: MPI.C_DOUBLE_COMPLEX}

# Types that MPI can reduce. bf16 and fp16 are reduced as fp32, bool as uint8.
_NUMBERS = {
    torch.float64: MPI.DOUBLE,
    torch.float32: MPI.FLOAT,
    torch.int64: MPI.INT64_T,
    torch.int32: MPI.INT32_T,
    torch.int16: MPI.INT16_T,
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
}
_WIRE = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.bool: torch.uint8}

_Kind: Any = ReduceOp.RedOpType  # torch's stubs do not list its members
_OPS = {_Kind.SUM: MPI.SUM, _Kind.AVG: MPI.SUM, _Kind.MIN: MPI.MIN, _Kind.MAX: MPI.MAX, _Kind.PRODUCT: MPI.PROD}
_BIT_OPS = {_Kind.BAND: MPI.BAND, _Kind.BOR: MPI.BOR, _Kind.BXOR: MPI.BXOR}
# On uint8 that holds 0 or 1: a sum is "any", a product is "all", so the result is a valid bool at any number of ranks.
_BOOL_OPS = {_Kind.SUM: MPI.MAX, _Kind.MIN: MPI.MIN, _Kind.MAX: MPI.MAX, _Kind.PRODUCT: MPI.MIN}


def dense(tensor: Tensor) -> Tensor:
    """`tensor` without autograd, contiguous, on the host: its own memory if possible, otherwise a copy."""
    _check_dense(tensor)
    return tensor.detach().cpu().contiguous()


def receive_buffer(target: Tensor) -> Tensor:
    """Contiguous host tensor to receive into for `target`: its own memory if possible, otherwise new memory."""
    _check_dense(target)
    if target.device.type == "cpu" and target.is_contiguous():
        return target.detach()
    return torch.empty(target.shape, dtype=target.dtype)


def copy_result(result: Tensor, target: Tensor) -> None:
    """Copy contiguous `result` (dtype may differ) into `target` unless it is `target`'s own memory."""
    if (result.data_ptr(), result.dtype, result.device) != (target.data_ptr(), target.dtype, target.device):
        target.detach().copy_(result.view(target.shape))


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors share memory. MPI forbids it between send and receive buffers."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def flatten(tensors: list[Tensor]) -> Tensor:
    """One new 1-D tensor of all values, in order."""
    return torch.cat([dense(tensor).view(-1) for tensor in tensors])


def copy_parts(whole: Tensor, targets: list[Tensor]) -> None:
    """Copy consecutive parts of 1-D `whole` into `targets`."""
    for part, target in zip(whole.split([target.numel() for target in targets]), targets, strict=True):
        copy_result(part, target)


def raw(tensor: Tensor, counts: int | list[int] | None = None) -> Spec:
    """MPI buffer over a contiguous tensor of any dtype, for traffic that is not reduced.

    `counts` in elements: per rank for the calls that end in v, of one rank's part for gathers; default all elements.
    """
    return [host_bytes(tensor), tensor.numel() if counts is None else counts, _CARRIERS[tensor.element_size()]]


@dataclass(frozen=True)
class Reduction:
    """One reduce operation on one dtype: the dtype that MPI reduces, and the conversion of the result."""

    dtype: torch.dtype
    wire: torch.dtype
    op: MPI.Op
    divisor: int

    @staticmethod
    def of(reduce_op: ReduceOp, dtype: torch.dtype, ranks: int) -> Reduction:
        """Raise ValueError for an operation without meaning (AVG of bool) or without MPI operation (PREMUL_SUM)."""
        kind = getattr(reduce_op, "op", reduce_op)
        wire = _WIRE.get(dtype, dtype)
        ops = _BOOL_OPS if dtype is torch.bool else _OPS if dtype.is_floating_point else _OPS | _BIT_OPS
        if kind not in ops or wire not in _NUMBERS:
            raise ValueError(
                f"mpi_host cannot reduce {dtype} with {kind}; it takes SUM, AVG (not of bool), MIN, MAX, PRODUCT, and "
                "BAND, BOR, BXOR of integers, on float64, float32, bfloat16, float16, int64/32/16/8, uint8 and bool"
            )
        return Reduction(dtype, wire, ops[kind], ranks if kind == _Kind.AVG else 1)

    def to_wire(self, tensor: Tensor) -> Tensor:
        """Contiguous tensor of the wire dtype, in `tensor`'s own memory where possible."""
        tensor = dense(tensor)
        return tensor.view(self.wire) if self.dtype is torch.bool else tensor.to(self.wire)

    def receive_buffer(self, target: Tensor) -> Tensor:
        """Contiguous tensor of the wire dtype to receive into, in `target`'s own memory where possible."""
        place = receive_buffer(target)
        if self.dtype is torch.bool:
            return place.view(self.wire)
        return place if self.dtype is self.wire else torch.empty_like(place, dtype=self.wire)

    def from_wire(self, wire: Tensor, target: Tensor) -> None:
        """Copy the reduced `wire` to `target`. AVG divides before rounding to the dtype; integers round toward zero."""
        if self.divisor > 1:
            wire.div_(self.divisor, rounding_mode=None if wire.is_floating_point() else "trunc")
        copy_result(wire.view(torch.bool) if self.dtype is torch.bool else wire, target)

    def spec(self, wire: Tensor, count: int | None = None) -> Spec:
        """MPI buffer over a contiguous tensor of the wire dtype; `count` elements per rank, default all of them."""
        return [host_bytes(wire), wire.numel() if count is None else count, _NUMBERS[self.wire]]


def row_counts(tensor: Tensor, splits: list[int], ranks: int) -> list[int]:
    """Elements per rank of a tensor split along its first dimension: `splits` rows, or equal parts if that is empty."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if splits is None or len(splits) == 0:
        if rows % ranks:
            raise ValueError(f"{rows} rows do not split evenly over {ranks} ranks; pass the split sizes")
        splits = [rows // ranks] * ranks
    if len(splits) != ranks or sum(splits) != rows:
        raise ValueError(f"split sizes {splits} must be {ranks} numbers that add up to {rows} rows")
    width = math.prod(tensor.shape[1:])
    return [split * width for split in splits]


def _check_dense(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise ValueError(f"mpi_host takes dense tensors, found layout {tensor.layout}; call .to_dense() first")


# torch's stubs list overloads and return types that a Python process group and its Work need not have.
# mypy: disable-error-code="override, assignment"


BACKEND = "mpi_host"


def register(comm_world: MPI.Intracomm) -> None:
    """Register the backend with torch.distributed. The ranks of its groups are ranks of `comm_world`.

    Collective over `comm_world` the first time; later calls have no effect.
    """
    if BACKEND in dist.Backend.backend_list:
        return
    # a communicator of its own, so that messages never match those of `comm_world`
    control = duplicate(comm_world)

    def create(options: Any, _backend_options: Any) -> MpiProcessGroup:
        # torch passes no ranks for the default group, which has all of them
        ranks = list(options.global_ranks_in_group) or list(range(control.size))
        return MpiProcessGroup(control, ranks, options)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])


class MpiProcessGroup(dist.ProcessGroup):
    """The ranks of one process group; rank numbers in its methods are ranks in this group.

    The options that torch passes (`opts`) carry the reduce operation or the root; timeouts and asyncOp are ignored.
    """

    def __init__(self, control: MPI.Intracomm, ranks: list[int], options: Any) -> None:
        """Collective over `ranks` of `control`. `options` is what torch passes to the creator of a backend."""
        super().__init__(options.group_rank, len(ranks))  # type: ignore[call-arg]  # the one for Python subclasses
        self._rank: int = options.group_rank
        self._size = len(ranks)
        self._name: str = options.group_id
        self._pending: list[MpiWork] = []
        self._comm: MPI.Intracomm = MPI.COMM_SELF
        if self._size > 1:  # MPICH has about 2,046 communicators, and COMM_SELF costs none of them
            tag = zlib.crc32(self._name.encode()) % 32768  # of groups that overlapping ranks make at the same time
            self._comm = create_group(control, ranks, tag)
            self._comm.Set_errhandler(MPI.ERRORS_RETURN)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return BACKEND

    # The base class reads the group's name and devices from C++ backends; this group has none.
    @property
    def group_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> MpiProcessGroup:
        return self

    # names by which C++ calls these methods
    getRank = rank
    getSize = size
    getBackendName = name

    def getGroupName(self) -> str:
        return self._name

    def shutdown(self) -> None:
        """Free the communicator. Collective over the group; `dist.destroy_process_group` calls it."""
        comm, self._comm = self._comm, MPI.COMM_NULL
        if comm not in (MPI.COMM_NULL, MPI.COMM_SELF) and not MPI.Is_finalized():
            comm.Free()

    def abort(self) -> None:
        """Forget the communicator without freeing it, which would need the other ranks."""
        self._comm = MPI.COMM_NULL

    def allreduce(self, tensors: list[Tensor], opts: Any) -> MpiWork:
        for tensor in tensors:
            reduction = Reduction.of(opts.reduceOp, tensor.dtype, self._size)
            if self._size > 1:
                wire = reduction.to_wire(tensor)
                wait(self._comm.Iallreduce(MPI.IN_PLACE, reduction.spec(wire), op=reduction.op))
                reduction.from_wire(wire, tensor)
        return MpiWork(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> MpiWork:
        """Ranks other than the root keep their values (gloo overwrites them)."""
        for tensor in tensors:
            reduction = Reduction.of(opts.reduceOp, tensor.dtype, self._size)
            if self._size > 1:
                wire = reduction.to_wire(tensor)
                if self._rank == opts.rootRank:
                    wait(self._comm.Ireduce(MPI.IN_PLACE, reduction.spec(wire), op=reduction.op, root=self._rank))
                    reduction.from_wire(wire, tensor)
                else:
                    wait(self._comm.Ireduce(reduction.spec(wire), None, op=reduction.op, root=opts.rootRank))
        return MpiWork(tensors)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> MpiWork:
        """Reduce each rank's part over all ranks.

        Args:
            input: the concatenated parts of all ranks; `output` may be a slice of it.
        """
        self._check_parts("reduce_scatter", whole=input, part=output)
        reduction = Reduction.of(opts.reduceOp, input.dtype, self._size)
        whole, part = reduction.to_wire(input), reduction.receive_buffer(output)
        # megatron reduces a gradient buffer into this rank's slice of the same buffer.
        if overlap(whole, part):
            part = torch.empty_like(part)
        send = reduction.spec(whole, part.numel())
        wait(self._comm.Ireduce_scatter_block(send, reduction.spec(part), op=reduction.op))
        reduction.from_wire(part, output)
        return MpiWork([output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> MpiWork:
        for output, input in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, input, opts)
        return MpiWork(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> MpiWork:
        """Each list of inputs has one tensor per rank, which may differ in size."""
        for output, parts in zip(outputs, inputs, strict=True):
            reduction = Reduction.of(opts.reduceOp, output.dtype, self._size)
            whole, part = reduction.to_wire(flatten(parts)), reduction.receive_buffer(output)
            counts = [tensor.numel() for tensor in parts]
            wait(self._comm.Ireduce_scatter(reduction.spec(whole), reduction.spec(part), counts, op=reduction.op))
            reduction.from_wire(part, output)
        return MpiWork(outputs)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> MpiWork:
        if self._size > 1:
            for tensor in tensors:
                data = dense(tensor) if self._rank == opts.rootRank else receive_buffer(tensor)
                wait(self._comm.Ibcast(raw(data), root=opts.rootRank))
                if self._rank != opts.rootRank:
                    copy_result(data, tensor)
        return MpiWork(tensors)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> MpiWork:
        """Gather `input` of all ranks.

        Args:
            output: the concatenated parts of all ranks; `input` may be a slice of it.
        """
        self._check_parts("all_gather", whole=output, part=input)
        whole, part = receive_buffer(output), dense(input)
        # megatron gathers parameters from this rank's slice of the buffer that receives them
        if part.data_ptr() == whole.view(-1)[self._rank * part.numel() :].data_ptr():
            wait(self._comm.Iallgather(MPI.IN_PLACE, raw(whole, part.numel())))
        else:
            source = part.clone() if overlap(part, whole) else part
            wait(self._comm.Iallgather(raw(source), raw(whole, part.numel())))
        copy_result(whole, output)
        return MpiWork([output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        for output, input in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, input)
        return MpiWork(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        """Each list of outputs has one tensor per rank, which may differ in size."""
        for parts, input in zip(outputs, inputs, strict=True):
            counts = [part.numel() for part in parts]
            whole = torch.empty(sum(counts), dtype=input.dtype)
            wait(self._comm.Iallgatherv(raw(dense(input)), raw(whole, counts)))
            copy_parts(whole, parts)
        return MpiWork([part for parts in outputs for part in parts])

    allgather_coalesced = allgather

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> MpiWork:
        """`outputs` is one list with a tensor per rank on the root, and empty elsewhere."""
        send = dense(inputs[0])
        if self._rank != opts.rootRank:
            wait(self._comm.Igatherv(raw(send), None, root=opts.rootRank))
            return MpiWork(inputs)
        counts = [part.numel() for part in outputs[0]]
        whole = send.new_empty(sum(counts))
        wait(self._comm.Igatherv(raw(send), raw(whole, counts), root=opts.rootRank))
        copy_parts(whole, outputs[0])
        return MpiWork(outputs[0])

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> MpiWork:
        """`inputs` is one list with a tensor per rank on the root, and empty elsewhere."""
        part = receive_buffer(outputs[0])
        if self._rank == opts.rootRank:
            counts = [tensor.numel() for tensor in inputs[0]]
            wait(self._comm.Iscatterv(raw(flatten(inputs[0]), counts), raw(part), root=opts.rootRank))
        else:
            wait(self._comm.Iscatterv(None, raw(part), root=opts.rootRank))
        copy_result(part, outputs[0])
        return MpiWork(outputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> MpiWork:
        """Splits are rows of the first dimension per rank; empty means equal parts."""
        send, receive = dense(input), receive_buffer(output)
        if overlap(send, receive):
            send = send.clone()
        input_counts = row_counts(input, input_splits, self._size)
        output_counts = row_counts(output, output_splits, self._size)
        wait(self._comm.Ialltoallv(raw(send, input_counts), raw(receive, output_counts)))
        copy_result(receive, output)
        return MpiWork([output])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        """One tensor per rank on both sides; sizes may differ."""
        input_counts = [tensor.numel() for tensor in inputs]
        output_counts = [tensor.numel() for tensor in outputs]
        whole = torch.empty(sum(output_counts), dtype=outputs[0].dtype)
        wait(self._comm.Ialltoallv(raw(flatten(inputs), input_counts), raw(whole, output_counts)))
        copy_parts(whole, outputs)
        return MpiWork(outputs)

    def barrier(self, opts: Any = None) -> MpiWork:
        if self._size > 1:
            wait(self._comm.Ibarrier())
        return MpiWork([])

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> MpiWork:
        (tensor,) = tensors
        data = dense(tensor)
        return self._hold(MpiWork([tensor, data], self._comm.Isend(raw(data), dest=dst, tag=tag)))

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> MpiWork:
        (tensor,) = tensors
        data = receive_buffer(tensor)
        spec = raw(data)

        def finish(status: MPI.Status) -> None:
            count = status.Get_count(spec[2])
            if count != data.numel():
                raise RuntimeError(
                    f"received {count} elements of {data.element_size()} bytes from rank {status.Get_source()} into a "
                    f"tensor of {data.numel()}; sender and receiver must agree on the size"
                )
            copy_result(data, tensor)

        return self._hold(MpiWork([tensor], self._comm.Irecv(spec, source=src, tag=tag), finish))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> MpiWork:
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    def _start_coalescing(self, device: torch.device) -> None:
        """Do nothing: collectives end in their calls, and `_end_coalescing` waits for sends and receives."""

    def _end_coalescing(self, device: torch.device) -> MpiWork:
        for work in self._pending:
            work.wait()
        return MpiWork([])

    def _hold(self, work: MpiWork) -> MpiWork:
        """Keep `work` until it has ended, because MPI uses its memory even if the caller drops it."""
        self._pending = [other for other in self._pending if not other.is_completed()]
        self._pending.append(work)
        return work

    def _check_parts(self, call: str, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != self._size * part.numel() or whole.dtype != part.dtype:
            raise ValueError(
                f"{call}: the whole has {whole.numel()} elements of {whole.dtype}, one of {self._size} parts has "
                f"{part.numel()} of {part.dtype}; the whole must be {self._size} times the part, in the same dtype"
            )


class MpiWork(Work):
    """A pending or finished operation. Holds its tensors, completes once, and raises on the thread that waits."""

    def __init__(
        self,
        tensors: list[Tensor],
        request: MPI.Request | None = None,
        finish: Callable[[MPI.Status], None] | None = None,
    ) -> None:
        """`finish` is called with the status of `request` when it has ended, and copies the result."""
        super().__init__()
        self._tensors = tensors
        self._request = request
        self._finish = finish
        self._source = -1
        self._error: Exception | None = None
        self._future: _MpiFuture | None = None

    def is_completed(self) -> bool:
        if self._request is None:
            return True
        status = MPI.Status()
        try:
            if not self._request.Test(status):
                return False
            self._source = status.Get_source()
            if self._finish is not None:
                self._finish(status)
        except Exception as error:
            self._error = error
        self._request = self._finish = None
        if self._future is not None:
            self._future.fire(self)
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the operation; returns True. `timeout` is ignored, because the watchdog finds hangs."""
        if self._request is not None:
            wait_for_ranks(self.is_completed)
        if self._error is not None:
            raise self._error
        return True

    synchronize = wait

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Tensor]:
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        """Group rank of the sender of a received message."""
        self.wait()
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """Future of the tensors. Its callbacks run on the thread whose test or wait completes the operation."""
        if self._future is None:
            self._future = _MpiFuture(self)
            if self._request is None:
                self._future.fire(self)
        return self._future


class _MpiFuture(torch.futures.Future):
    """A future whose `wait` makes progress in MPI itself, because no other thread does."""

    def __new__(cls, work: MpiWork) -> _MpiFuture:
        return super().__new__(cls)

    def __init__(self, work: MpiWork) -> None:
        super().__init__()
        self._work = work

    def fire(self, work: MpiWork) -> None:
        if work.exception() is None:
            self.set_result(work._tensors)
        else:
            self.set_exception(work.exception())

    def done(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> Any:
        wait_for_ranks(self._work.is_completed)
        return super().wait()
