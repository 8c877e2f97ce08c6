"""Moves between GPUs: NCCL point-to-point. Nobody has run this on a GPU yet; with gloo groups it runs on the CPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.reshard.buckets import Part, messages
from hpcrl.reshard.events import Events
from hpcrl.reshard.planner import Move
from hpcrl.reshard.rectangles import Weights, destination_part, source_part


class DeviceMessages:
    """Pieces go from slice to slice where both ends are contiguous and of the engine's dtype, and through a buffer on
    the side where not. The n-th messages of all pairs make one batch, so that batches cannot wait in a circle.

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
        self.nbytes = 0  # staged at most in any batch so far

    def start(self, events: Events, source: Weights, destination: Weights) -> None:
        """Queue one refit on the current stream."""
        for number in range(self._num_batches):
            self._batch(number, source, destination)

    def close(self) -> None:
        pass

    def _batch(self, number: int, source: Weights, destination: Weights) -> None:
        operations: list[dist.P2POp] = []
        landings: list[tuple[Tensor, Tensor]] = []
        staged = 0
        for peer, part in _parts(self._sends, number):
            piece = source_part(source, part.move)
            values = piece.to(self._dtype).contiguous()
            staged += values.nbytes if values.data_ptr() != piece.data_ptr() else 0
            operations.append(dist.P2POp(dist.isend, values, peer, self._group))
        for peer, part in _parts(self._receives, number):
            piece = destination_part(destination, part.move)
            landing = piece if piece.is_contiguous() else torch.empty_like(piece, memory_format=torch.contiguous_format)
            if landing is not piece:
                landings.append((landing, piece))
                staged += landing.nbytes
            operations.append(dist.P2POp(dist.irecv, landing, peer, self._group))
        self.nbytes = max(self.nbytes, staged)
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for landing, piece in landings:
            piece.copy_(landing)


def _parts(peers: dict[int, list[list[Part]]], number: int) -> list[tuple[int, Part]]:
    return [(peer, part) for peer, its in peers.items() if number < len(its) for part in its[number]]
