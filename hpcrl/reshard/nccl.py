"""Moves between GPUs: NCCL point-to-point. Not yet run on a GPU; with gloo groups it runs on the CPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.kernels.pack import RepeatedCopies
from hpcrl.reshard.buckets import Part, messages
from hpcrl.reshard.events import Events
from hpcrl.reshard.planner import Move
from hpcrl.reshard.rectangles import Weights, destination_part, source_part
from hpcrl.runtime import platform


class DeviceMessages:
    """Pieces go from slice to slice where both ends are contiguous and of the engine's dtype, and through a buffer on
    the side where not, which on a GPU one launch fills and one empties. The n-th messages of all pairs make one batch,
    so that batches cannot wait in a circle.

    `group` has the refit's ranks; `sends` and `receives` are by world rank. `max_bytes` bounds a message between two
    ranks, and is the same on every rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        sends: dict[int, list[Move]],
        receives: dict[int, list[Move]],
        dtype: torch.dtype,
        max_bytes: int,
    ) -> None:
        self._group, self._dtype = group, dtype
        self._sends = {peer: messages(moves, max_bytes) for peer, moves in sends.items()}
        self._receives = {peer: messages(moves, max_bytes) for peer, moves in receives.items()}
        self._num_batches = max((len(its) for its in (*self._sends.values(), *self._receives.values())), default=0)
        self._packs, self._unpacks = ([RepeatedCopies() for _ in range(self._num_batches)] for _ in range(2))
        self.nbytes = 0  # staged at most in any batch so far
        # The first operation of a group connects it, and not every rank takes part in the first batch.
        dist.all_reduce(torch.zeros(1, device=platform.device()), group=group)

    def start(self, events: Events, source: Weights, destination: Weights) -> None:
        """Queue one refit on the current stream."""
        for number in range(self._num_batches):
            self._batch(number, source, destination)

    def close(self) -> None:
        pass

    def _batch(self, number: int, source: Weights, destination: Weights) -> None:
        leaving = [(peer, source_part(source, part.move)) for peer, part in _parts(self._sends, number)]
        arriving = [(peer, destination_part(destination, part.move)) for peer, part in _parts(self._receives, number)]
        if not leaving and not arriving:
            return
        sources, destinations = [piece for _, piece in leaving], [piece for _, piece in arriving]
        sent, received = self._as_sent(sources, destinations)
        _copy(self._packs[number], sources, sent)
        operations = [
            dist.P2POp(operation, values, peer, self._group)
            for operation, pieces, its in ((dist.isend, leaving, sent), (dist.irecv, arriving, received))
            for (peer, _), values in zip(pieces, its, strict=True)
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        _copy(self._unpacks[number], received, destinations)

    def _as_sent(self, *pieces: list[Tensor]) -> list[list[Tensor]]:
        """Each piece itself, or a place for it in the batch's buffer, in the engine's dtype and without gaps."""
        sizes = [piece.numel() for its in pieces for piece in its if not self._goes_itself(piece)]
        device = next(piece.device for its in pieces for piece in its)
        buffer = torch.empty(sum(sizes), dtype=self._dtype, device=device)
        self.nbytes = max(self.nbytes, buffer.nbytes)
        places = iter(buffer.split(sizes))
        return [
            [piece if self._goes_itself(piece) else next(places).view(piece.shape) for piece in its] for its in pieces
        ]

    def _goes_itself(self, piece: Tensor) -> bool:
        return piece.dtype == self._dtype and piece.is_contiguous()


def _copy(copies: RepeatedCopies, sources: list[Tensor], destinations: list[Tensor]) -> None:
    """Where they are not one and the same."""
    pairs = [pair for pair in zip(sources, destinations, strict=True) if pair[0] is not pair[1]]
    copies.run([tensor for pair in pairs for tensor in pair], lambda: pairs)


def _parts(peers: dict[int, list[list[Part]]], number: int) -> list[tuple[int, Part]]:
    return [(peer, part) for peer, its in peers.items() if number < len(its) for part in its[number]]
