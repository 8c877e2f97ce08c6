"""All supplies of a resharding, with the senders' shares settled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from hpcrl.reshard.balance import Demand, balanced
from hpcrl.reshard.pieces import Cell, Piece, cut
from hpcrl.reshard.streams import Delivery, NodeOf, Supply, Target, by_node


class Routes:
    """Who sends what to whom. Work grows with the ranks and with the pieces, not with their product: only the
    deliveries that somebody asks for are made one by one."""

    def __init__(self, source: list[Cell], destination: list[Cell], node_of: NodeOf, itemsize: int) -> None:
        needs: dict[tuple[int, ...], dict[int, list[Piece]]] = defaultdict(lambda: defaultdict(list))
        for number, pieces in enumerate(cut(source, destination)):
            for piece in pieces:
                needs[piece.holders][number].append(piece)
        places = [by_node(cell.ranks, node_of) for cell in destination]
        supplies = [
            Supply({number: source[number].ranks for number in holders}, dict(its), places, node_of, itemsize)
            for holders, its in needs.items()
        ]
        self._streams = [stream for supply in supplies for stream in supply.streams]
        shares = balanced([Demand(stream.senders, stream.nbytes) for stream in self._streams])
        for stream, its in zip(self._streams, shares, strict=True):
            stream.shares = its

        self._targets: dict[int, list[Target]] = defaultdict(list)  # by rank
        for number, cell in enumerate(destination):
            for rank in cell.ranks:
                self._targets[rank].append(Target(number, rank))
        self._supplies_to: list[list[Supply]] = [[] for _ in destination]
        self._supplies_of: dict[int, list[Supply]] = defaultdict(list)  # by holder's rank
        for supply in supplies:
            for number in supply.needs:
                self._supplies_to[number].append(supply)
            for rank in supply.place:
                self._supplies_of[rank].append(supply)
        self._needed = [sum(supply.nbytes[number] for supply in its) for number, its in enumerate(self._supplies_to)]

    def deliveries(self) -> Iterator[Delivery]:
        """Everything that goes from one rank to another."""
        for stream in self._streams:
            yield from stream.deliveries()

    def deliveries_of(self, rank: int) -> Iterator[Delivery]:
        """What `rank` sends to others or receives from them."""
        for supply in self._supplies_of.get(rank, ()):
            for stream in supply.streams_from(rank):
                yield from stream.deliveries_from(rank)
        for target in self._targets.get(rank, ()):
            for supply in self._supplies_to[target.cell]:
                if rank not in supply.place:
                    yield from supply.stream_to(rank).deliveries_to(target)

    def copies(self, rank: int) -> Iterator[Delivery]:
        """What `rank` needs and has."""
        for supply, target in self._own(rank):
            yield from supply.copies(target)

    def held(self, rank: int) -> int:
        """Bytes of what `rank` needs and has."""
        return sum(supply.nbytes[target.cell] for supply, target in self._own(rank))

    def missing(self, rank: int) -> int:
        """Bytes of what `rank` needs and has not."""
        return sum(self._needed[target.cell] for target in self._targets.get(rank, ())) - self.held(rank)

    def sent(self) -> dict[int, int]:
        """Bytes by sender."""
        total: dict[int, int] = defaultdict(int)
        for stream in self._streams:
            for sender, nbytes in stream.sent():
                total[sender] += nbytes
        return dict(total)

    def cross_node_bytes(self) -> int:
        return sum(stream.nbytes for stream in self._streams if stream.is_far)

    def _own(self, rank: int) -> Iterator[tuple[Supply, Target]]:
        for target in self._targets.get(rank, ()):
            for supply in self._supplies_of.get(rank, ()):
                if target.cell in supply.needs:
                    yield supply, target
