"""The `torch.distributed` backend `mpi_host`: collectives and point-to-point over mpi4py.

A Python `ProcessGroup` with one communicator per group. `torch.distributed` calls its methods by the names of the
installed torch: `_allgather_base` and similar names up to 2.9, `all_gather_single` and similar ones in 2.13; both are
here. Collectives complete inside the call; only sends and receives are pending until their Work is waited for.
Everything must be called from the one thread that calls MPI.
"""

# torch's stubs list overloads and return types that a Python process group and its Work need not have.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor
from torch._C._distributed_c10d import Work

from hpcrl.runtime.mpi import create_group, duplicate, wait, wait_for_ranks
from hpcrl.runtime.mpi_buffers import (
    Reduction,
    copy_parts,
    copy_result,
    dense,
    flatten,
    overlap,
    raw,
    receive_buffer,
    row_counts,
)

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
            self._comm = _create_comm(control, ranks, self._name)

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
        """`input`: the concatenated parts of all ranks; `output` may be a slice of it."""
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
        """`output`: the concatenated parts of all ranks; `input` may be a slice of it."""
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
            found = status.Get_count(spec[2])
            if found != data.numel():
                raise RuntimeError(
                    f"received {found} elements of {data.element_size()} bytes from rank {status.Get_source()} into a "
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


def _create_comm(control: MPI.Intracomm, ranks: list[int], name: str) -> MPI.Intracomm:
    """Communicator of `ranks`, in that order. Collective over these ranks only."""
    tag = (
        zlib.crc32(name.encode()) % 32768
    )  # distinguishes groups that overlapping sets of ranks create at the same time
    comm = create_group(control, ranks, tag)
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm


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
