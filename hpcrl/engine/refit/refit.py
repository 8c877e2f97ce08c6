"""Execution of a refit plan: aliases, local copies, and transfers between ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from hpcrl.engine.refit.messages import Buffers, RequestLoop, Weights, copy, destination_part, source_part
from hpcrl.engine.refit.planner import Move, Resharding, SharedSlice
from hpcrl.engine.refit.row_scales import RowScales
from hpcrl.engine.refit.transports import make_transports
from hpcrl.engine.refit.verification import Verifier
from hpcrl.kernels.dispatch import use_triton
from hpcrl.kernels.fp8_matrix import Fp8Matrix
from hpcrl.kernels.pack import RepeatedCopies
from hpcrl.runtime import accelerator, platform
from hpcrl.runtime.mpi import create_group
from hpcrl.runtime.spans import spans

if TYPE_CHECKING:
    import torch.distributed as dist
    from mpi4py import MPI


Verify = Literal["first", "always", "never"]

MIB = 2**20
DEFAULT_BUCKET_BYTES = 256 * MIB
NUM_VERIFIED = 2  # refits
SCRATCH_BYTES = MIB
DEVICE_SCRATCH_BYTES = 64 * MIB  # large, because each block starts some 20 kernels
TAG = 7301


class RefitReport(NamedTuple):
    """One refit on one rank. Bytes are of values in the destination's dtype."""

    seconds: float  # without the comparison of checksums
    bytes_sent: int
    bytes_received: int
    bytes_copied: int
    bytes_aliased: int
    peak_extra_bytes: int  # held at once beyond source and destination
    checksum_seconds: float


class Refit:
    """Copies weights from their training layout into the buffers of an engine.

    `comm` contains the ranks of the layouts and is not kept. Construction, `run` and `close` are collective over the
    ranks of the two layouts. Ranks of one of the plan's `nodes` share memory. `bucket_bytes` bounds the buffers for
    transfers and checksums together; most of it is allocated once and kept. `verify` selects the refits after which
    checksums are compared: the first two, each, or none. The engine has the weights `quantized` as `Fp8Matrix`: values
    are sent in `dtype`, and quantised when they are written.

    Args:
        device_group: the refit's ranks over NCCL, for weights on GPUs.
    """

    def __init__(
        self,
        resharding: Resharding,
        comm: MPI.Intracomm,
        rank: int,
        dtype: torch.dtype,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        verify: Verify = "first",
        device_group: dist.ProcessGroup | None = None,
        quantized: Collection[str] = (),
    ) -> None:
        if dtype.itemsize != resharding.itemsize:
            raise ValueError(
                f"the plan has itemsize={resharding.itemsize}, but {dtype} has {dtype.itemsize} bytes per element"
            )
        self._dtype, self._verify = dtype, verify
        source, destination = resharding.source, resharding.destination
        self._ranks = tuple(sorted({*source.ranks, *destination.ranks}))
        self._comm = create_group(comm, self._ranks, TAG)
        # Files share nothing, and merged adapters are computed whenever a weight is read.
        same = resharding.shared(rank) if resharding.destination_format == "megatron" else ()
        self._same = [part for part in same if part.name not in quantized]
        most = SCRATCH_BYTES if platform.device().type == "cpu" else DEVICE_SCRATCH_BYTES
        scratch = min(most, bucket_bytes // 4) if verify != "never" else 0
        self._scales = RowScales(resharding, self._comm, rank, dtype, quantized) if quantized else None
        self._verifier = Verifier(resharding, self._comm, self._ranks, rank, dtype, scratch, self._scales)
        plan = resharding.plan_for_rank(rank)
        self._copies = plan.copies(rank)
        self._repeated_copies = RepeatedCopies()
        self._traffic = plan.traffic(rank)
        self._rank = rank
        self._bytes_to = {peer: sum(move.nbytes for move in moves) for peer, moves in plan.sends(rank).items()}
        self._bytes_from = {peer: sum(move.nbytes for move in moves) for peer, moves in plan.receives(rank).items()}
        self._scratch_bytes = scratch
        self._num_runs = 0
        nodes = resharding.nodes
        self._transports = make_transports(
            self._comm,
            self._ranks,
            tuple(other for other in self._ranks if nodes is None or nodes[other] == nodes[rank]),
            plan.sends(rank),
            plan.receives(rank),
            dtype,
            bucket_bytes - scratch,
            device_group,
        )

    def share(self, source: Weights, destination: Buffers, adopt: Callable[[str, Tensor], None]) -> None:
        """Alias the engine's weights to the source's tensors where this rank has the same slice in the same order on
        both sides.

        Only for roles that take turns. Tensors that are already aliased are skipped.
        """
        for part in self._same:
            own, other = source[part.name], destination[part.dst_name]
            assert isinstance(other, Tensor)
            if own.data_ptr() != other.data_ptr() and (own.dtype, own.device) == (other.dtype, other.device):
                adopt(part.dst_name, own)

    @torch.no_grad()
    def run(self, source: Weights, destination: Buffers) -> RefitReport:
        """Fill `destination` from all ranks' `source`. Both map parameter names to this rank's local tensors; the
        source uses global names. A rank outside one of the layouts passes an empty mapping there.

        Values are rounded to the destination's dtype before they are sent. Aliased tensors are skipped. Raises
        ChecksumMismatch, on every rank.
        """
        start = time.perf_counter()
        for name, tensor in destination.items():
            if tensor.dtype != self._dtype:
                raise ValueError(f"engine weight {name} has dtype {tensor.dtype}; the refit has {self._dtype}")
        aliased = {part.name for part in self._same if _is_aliased(part, source, destination)}
        copies = [move for move in self._copies if move.name not in aliased]
        if self._scales is not None:
            self._scales.update(source, destination)
        loop = RequestLoop()
        for transport in self._transports:
            transport.start(loop, source, destination)
        loop.run(self._copied(copies, source, destination))
        accelerator.synchronize(platform.device())
        ended = time.perf_counter()
        seconds = ended - start
        for peer, nbytes in self._bytes_to.items():
            spans.add_transfer("refit", self._rank, peer, nbytes, start, ended)
        for peer, nbytes in self._bytes_from.items():
            spans.add_transfer("refit", peer, self._rank, nbytes, start, ended)
        self._num_runs += 1
        verifies = self._verify == "always" or (self._verify == "first" and self._num_runs <= NUM_VERIFIED)
        if verifies:
            with accelerator.annotated("checksums"):
                self._verifier.check(source, destination)
        copied = sum(move.nbytes for move in copies)
        return RefitReport(
            seconds,
            self._traffic.sent,
            self._traffic.received,
            copied,
            self._traffic.copied - copied,
            sum(it.nbytes for it in (*self._transports, self._scales) if it) + self._scratch_bytes * verifies,
            time.perf_counter() - start - seconds,
        )

    def close(self) -> None:
        """Free buffers and communicator; the end of the job does so as well."""
        for transport in self._transports:
            transport.close()
        self._comm.Free()

    def _copied(self, copies: list[Move], source: Weights, destination: Buffers) -> Iterator[None]:
        """Carry out one copy per step; on a GPU all of them in the first step."""
        written_first = destination[copies[0].dst_name] if copies else None
        if isinstance(written_first, Fp8Matrix):
            written_first = written_first.scales
        if written_first is not None and use_triton("pack", written_first):
            read, written = dict.fromkeys(move.name for move in copies), dict.fromkeys(move.dst_name for move in copies)
            tensors = [*(source[name] for name in read), *(destination[name] for name in written)]
            self._repeated_copies.run(tensors, lambda: _parts(copies, source, destination))
            return
        for part in _parts(copies, source, destination):
            copy(*part)
            yield


def _is_aliased(part: SharedSlice, source: Weights, destination: Buffers) -> bool:
    other = destination[part.dst_name]
    return isinstance(other, Tensor) and source[part.name].data_ptr() == other.data_ptr()


def _parts(copies: list[Move], source: Weights, destination: Buffers) -> Iterator[tuple[Tensor, Tensor | Fp8Matrix]]:
    for move in copies:
        yield source_part(source, move), destination_part(destination, move)
