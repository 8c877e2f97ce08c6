"""Senders of a resharding, with shares as equal as they can be. No torch, no communication."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from hpcrl.reshard.pieces import Cell, Piece, cut

SWEEPS = 200
TOLERANCE = 1000  # loads are settled once no share changes by more than a thousandth of the largest load


class Demand(NamedTuple):
    """Bytes any part of which any of `senders` may send."""

    senders: Sequence[int]
    nbytes: int


def balanced(demands: Sequence[Demand]) -> list[list[int]]:
    """For each demand the bytes of each of its senders, such that over all demands the loads are as equal as the
    choice of senders allows: the largest is the least possible, then the second largest, and so on.

    That is where the sum of squared loads is least (Hajek, 1990). Pouring one demand at a time onto the emptiest of
    its senders lowers that sum until it is there, within TOLERANCE. Integers only, so every rank gets the same.
    """
    load: dict[int, int] = defaultdict(int)
    shares = [[0] * len(demand.senders) for demand in demands]
    fewest_first = sorted(range(len(demands)), key=lambda number: len(demands[number].senders))
    for _ in range(SWEEPS):
        change = 0
        for number in fewest_first:
            senders, nbytes = demands[number]
            before = shares[number]
            others = [load[sender] - share for sender, share in zip(senders, before, strict=True)]
            after = shares[number] = _pour(nbytes, others)
            for sender, other, share in zip(senders, others, after, strict=True):
                load[sender] = other + share
            change = max(change, *(abs(new - old) for new, old in zip(after, before, strict=True)))
        if change * TOLERANCE <= max(load.values(), default=0):
            break
    return shares


def _pour(nbytes: int, levels: list[int]) -> list[int]:
    """What each vessel takes of `nbytes` when they fill the lowest of `levels` up to one common level."""
    order = sorted(range(len(levels)), key=levels.__getitem__)
    below = 0
    for count, place in enumerate(order, start=1):
        below += levels[place]
        if count == len(order) or (nbytes + below) <= levels[order[count]] * count:
            break
    level, rest = divmod(nbytes + below, count)
    taken = [0] * len(levels)
    for turn, place in enumerate(sorted(order[:count])):
        taken[place] = level - levels[place] + (turn < rest)
    return taken


class Target(NamedTuple):
    """A rank that needs something, as a member of one of its cells."""

    cell: int
    rank: int


class Delivery(NamedTuple):
    """Rows [first, end) of a piece; `origin` is where the whole piece starts, (row, col), in the source's tensor."""

    source: int
    origin: tuple[int, int]
    target: Target
    piece: Piece
    first: int
    end: int


class Unit(NamedTuple):
    """A rectangle in a line, `row_bytes` a row for all its takers together: (place in the block, piece)."""

    start: int
    row_bytes: int
    rows: int
    takers: tuple[tuple[int, Piece], ...]


Nodes = Mapping[int, list[int]]  # node -> ranks
NodeOf: TypeAlias = Sequence[int] | None  # by world rank; None: all share one


class Supply:
    """All that the same source cells hold and somebody needs; every rank of those cells can send any of it.

    Who needs it takes it from itself, else from its node (`near`), else from anybody (`far`). `holders` are the source
    cells and their ranks, `needs` the destination cells and their pieces.
    """

    def __init__(
        self,
        holders: dict[int, tuple[int, ...]],
        needs: dict[int, list[Piece]],
        destination_nodes: list[Nodes],
        node_of: NodeOf,
        itemsize: int,
    ) -> None:
        self.needs = needs
        self.place = {rank: place for place, ranks in enumerate(holders.values()) for rank in ranks}
        self.nbytes = {cell: sum(piece.rows * piece.cols for piece in its) * itemsize for cell, its in needs.items()}
        self.itemsize = itemsize
        self._node_of = node_of
        self._nodes = by_node(self.place, node_of)
        self._destination_nodes = destination_nodes
        self._units: dict[tuple[int, ...], tuple[list[int], list[Unit]]] = {}
        self.near: dict[int, Stream] = {}
        remote = {cell: sum(map(len, destination_nodes[cell].values())) for cell in needs}
        for node, senders in self._nodes.items():
            targets = []
            for cell in needs:
                here = destination_nodes[cell].get(node, [])
                remote[cell] -= len(here)
                targets += [Target(cell, rank) for rank in here if rank not in self.place]
            if targets:
                self.near[node] = Stream(self, senders, sum(self.nbytes[cell] for cell, _ in targets), targets)
        nbytes = sum(self.nbytes[cell] * number for cell, number in remote.items())
        self.far = Stream(self, list(self.place), nbytes) if nbytes else None

    @property
    def streams(self) -> list[Stream]:
        return [*self.near.values(), *([self.far] if self.far else [])]

    def stream_to(self, rank: int) -> Stream:
        """What brings it to a rank that needs it and has it not."""
        stream = self.near.get(_node(rank, self._node_of), self.far)
        assert stream is not None
        return stream

    def streams_from(self, rank: int) -> list[Stream]:
        """Those that a holder may send."""
        near = self.near.get(_node(rank, self._node_of))
        return [stream for stream in (near, self.far) if stream]

    def far_targets(self) -> list[Target]:
        return [
            Target(cell, rank)
            for cell in self.needs
            for node, ranks in self._destination_nodes[cell].items()
            if node not in self._nodes
            for rank in ranks
        ]

    def delivery(self, source: int, target: Target, piece: Piece, first: int, end: int) -> Delivery:
        return Delivery(source, piece.origins[self.place[source]], target, piece, first, end)

    def copies(self, target: Target) -> list[Delivery]:
        """What a holder has for itself."""
        return [self.delivery(target.rank, target, piece, 0, piece.rows) for piece in self.needs[target.cell]]

    def units(self, cells: tuple[int, ...]) -> tuple[list[int], list[Unit]]:
        """The line of a block whose targets are of these cells, rectangle after rectangle, and the units' starts."""
        if cells not in self._units:
            wanted: dict[tuple[object, ...], list[tuple[int, Piece]]] = defaultdict(list)
            for place, cell in enumerate(cells):
                for piece in self.needs[cell]:
                    wanted[piece.name, piece.origins, piece.rows, piece.cols].append((place, piece))
            units, start = [], 0
            for takers in wanted.values():
                _, piece = takers[0]
                unit = Unit(start, piece.cols * self.itemsize * len(takers), piece.rows, tuple(takers))
                units.append(unit)
                start += unit.row_bytes * unit.rows
            self._units[cells] = [unit.start for unit in units], units
        return self._units[cells]


class Stream:
    """Bytes that any of `senders` may send, laid out in a line of blocks; sender i sends [cuts[i], cuts[i + 1]).

    Near targets are one block, so that several of them get the same rectangle from the same sender, who packs it once.
    Far targets are a block each, so that each gets most of its bytes from one sender.
    """

    def __init__(self, supply: Supply, senders: list[int], nbytes: int, near: list[Target] | None = None) -> None:
        self.senders = senders
        self.nbytes = nbytes
        self.shares = [nbytes, *([0] * (len(senders) - 1))]
        self.is_far = near is None
        self._supply = supply
        self._near = near

    @cached_property
    def cuts(self) -> list[int]:
        """Where the shares end, moved to the nearest end of a row."""
        return [self._snapped(end) for end in accumulate(self.shares, initial=0)]

    def sent(self) -> Iterator[tuple[int, int]]:
        """(sender, bytes)."""
        for sender, start, end in zip(self.senders, self.cuts, self.cuts[1:], strict=False):
            yield sender, end - start

    def deliveries_from(self, rank: int) -> Iterator[Delivery]:
        sender = self.senders.index(rank)
        return self._deliveries(self.cuts[sender], self.cuts[sender + 1])

    def deliveries_to(self, target: Target) -> Iterator[Delivery]:
        number = self._block_of[target]
        bounds = self._starts[number : number + 2]
        return (delivery for delivery in self._deliveries(*bounds) if delivery.target == target)

    def deliveries(self) -> Iterator[Delivery]:
        return self._deliveries(0, self.nbytes)

    @cached_property
    def _blocks(self) -> list[tuple[Target, ...]]:
        return [(target,) for target in self._supply.far_targets()] if self._near is None else [tuple(self._near)]

    @cached_property
    def _starts(self) -> list[int]:
        """Of the blocks, and the end of the last one."""
        return list(accumulate((sum(self._supply.nbytes[t.cell] for t in block) for block in self._blocks), initial=0))

    @cached_property
    def _block_of(self) -> dict[Target, int]:
        return {target: number for number, block in enumerate(self._blocks) for target in block}

    def _units(self, number: int) -> tuple[list[int], list[Unit]]:
        return self._supply.units(tuple(target.cell for target in self._blocks[number]))

    def _snapped(self, position: int) -> int:
        number = bisect_right(self._starts, position) - 1
        inside = position - self._starts[number]
        if not inside:  # the end of the line among them
            return position
        starts, units = self._units(number)
        unit = units[bisect_right(starts, inside) - 1]
        rows = (2 * (inside - unit.start) + unit.row_bytes) // (2 * unit.row_bytes)
        return self._starts[number] + unit.start + rows * unit.row_bytes

    def _deliveries(self, low: int, high: int) -> Iterator[Delivery]:
        """The line between two bytes, cut by sender and by rectangle."""
        sender = bisect_right(self.cuts, low) - 1
        while low < high:
            while self.cuts[sender + 1] <= low:
                sender += 1
            end = min(high, self.cuts[sender + 1])
            for unit, targets, first, last in self._rows(low, end):
                for place, piece in unit.takers:
                    yield self._supply.delivery(self.senders[sender], targets[place], piece, first, last)
            low = end

    def _rows(self, low: int, high: int) -> Iterator[tuple[Unit, tuple[Target, ...], int, int]]:
        """(unit, its block, first row, end) of an interval that starts and ends at rows."""
        number = bisect_right(self._starts, low) - 1
        while number < len(self._blocks) and self._starts[number] < high:
            start = self._starts[number]
            starts, units = self._units(number)
            first = max(low - start, 0)
            for place in range(bisect_right(starts, first) - 1, len(units)):
                unit = units[place]
                if start + unit.start >= high:
                    break
                begin = max(first - unit.start, 0) // unit.row_bytes
                yield unit, self._blocks[number], begin, min((high - start - unit.start) // unit.row_bytes, unit.rows)
            number += 1


def by_node(ranks: Iterable[int], node_of: NodeOf) -> Nodes:
    found: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        found[_node(rank, node_of)].append(rank)
    return dict(found)


def _node(rank: int, node_of: NodeOf) -> int:
    return 0 if node_of is None else node_of[rank]


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
