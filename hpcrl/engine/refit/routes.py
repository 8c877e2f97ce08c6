"""Senders of a refit's transfers, with loads as equal as possible. No torch, no communication."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from hpcrl.engine.refit.pieces import Piece, ShardGroup, cut

SWEEPS = 200
TOLERANCE = 1000  # converged once no share changes by more than a thousandth of the largest load


class Demand(NamedTuple):
    """Bytes any part of which any of `senders` may send."""

    senders: Sequence[int]
    nbytes: int


def balanced(demands: Sequence[Demand]) -> list[list[int]]:
    """Return for each demand the bytes of each of its senders, such that over all demands the loads are as equal as
    possible: the largest is minimal, then the second largest, and so on.

    That minimises the sum of squared loads (Hajek, 1990). Water-filling one demand at a time over its least loaded
    senders lowers that sum until it converges, within TOLERANCE. Integers only, so every rank computes the same.
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
            after = shares[number] = _fill_lowest(nbytes, others)
            for sender, other, share in zip(senders, others, after, strict=True):
                load[sender] = other + share
            change = max(change, *(abs(new - old) for new, old in zip(after, before, strict=True)))
        if change * TOLERANCE <= max(load.values(), default=0):
            break
    return shares


def _fill_lowest(nbytes: int, levels: list[int]) -> list[int]:
    """Return what each sender takes of `nbytes` if the lowest of `levels` are filled up to one common level."""
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
    """A rank that needs something, as a member of one of its groups."""

    group: int
    rank: int


class Transfer(NamedTuple):
    """Rows [first, end) of a piece; `origin` is where the whole piece starts, (row, col), in the source's tensor."""

    source: int
    origin: tuple[int, int]
    target: Target
    piece: Piece
    first: int
    end: int


class Rectangle(NamedTuple):
    """A rectangle in a line, of `row_bytes` per row for all its receivers together: (place in the block, piece)."""

    start: int
    row_bytes: int
    rows: int
    receivers: tuple[tuple[int, Piece], ...]


Nodes = Mapping[int, list[int]]  # node -> ranks
NodeOf: TypeAlias = Sequence[int] | None  # by world rank; None: all ranks share one node


@dataclass(eq=False)
class PieceSet:
    """All pieces with the same source groups; every rank of these groups can send any part of them.

    A receiver prefers a local copy, then a sender on the same node (`near`), then any sender (`far`). `holders` are the
    source groups and their ranks, `needs` the destination groups and their pieces.
    """

    holders: dict[int, tuple[int, ...]]
    needs: dict[int, list[Piece]]
    destination_nodes: list[Nodes]
    node_of: NodeOf
    itemsize: int

    def __post_init__(self) -> None:
        needs, destination_nodes = self.needs, self.destination_nodes
        self.place = {rank: place for place, ranks in enumerate(self.holders.values()) for rank in ranks}
        self.nbytes = {
            group: sum(piece.rows * piece.cols for piece in pieces) * self.itemsize for group, pieces in needs.items()
        }
        self._nodes = by_node(self.place, self.node_of)
        self._rectangles: dict[tuple[int, ...], tuple[list[int], list[Rectangle]]] = {}
        self.near: dict[int, Channel] = {}
        remote = {group: sum(map(len, destination_nodes[group].values())) for group in needs}
        for node, senders in self._nodes.items():
            targets = []
            for group in needs:
                here = destination_nodes[group].get(node, [])
                remote[group] -= len(here)
                targets += [Target(group, rank) for rank in here if rank not in self.place]
            if targets:
                self.near[node] = Channel(self, senders, sum(self.nbytes[group] for group, _ in targets), targets)
        nbytes = sum(self.nbytes[group] * number for group, number in remote.items())
        self.far = Channel(self, list(self.place), nbytes) if nbytes else None
        self.channels = [*self.near.values(), *([self.far] if self.far else [])]

    def channel_to(self, rank: int) -> Channel:
        """Return the channel that reaches a rank which does not hold the pieces."""
        channel = self.near.get(_node(rank, self.node_of), self.far)
        assert channel is not None
        return channel

    def channels_from(self, rank: int) -> list[Channel]:
        """Return the channels that a holder may send on."""
        near = self.near.get(_node(rank, self.node_of))
        return [channel for channel in (near, self.far) if channel]

    def remote_targets(self) -> list[Target]:
        return [
            Target(group, rank)
            for group in self.needs
            for node, ranks in self.destination_nodes[group].items()
            if node not in self._nodes
            for rank in ranks
        ]

    def transfer(self, source: int, target: Target, piece: Piece, first: int, end: int) -> Transfer:
        return Transfer(source, piece.origins[self.place[source]], target, piece, first, end)

    def rectangles(self, groups: tuple[int, ...]) -> tuple[list[int], list[Rectangle]]:
        """Return the starts and the rectangles of a block whose targets are of these groups."""
        if groups not in self._rectangles:
            receivers_of: dict[tuple[object, ...], list[tuple[int, Piece]]] = defaultdict(list)
            for place, group in enumerate(groups):
                for piece in self.needs[group]:
                    receivers_of[piece.name, piece.origins, piece.rows, piece.cols].append((place, piece))
            rectangles, start = [], 0
            for receivers in receivers_of.values():
                _, piece = receivers[0]
                rectangle = Rectangle(start, piece.cols * self.itemsize * len(receivers), piece.rows, tuple(receivers))
                rectangles.append(rectangle)
                start += rectangle.row_bytes * rectangle.rows
            self._rectangles[groups] = [rectangle.start for rectangle in rectangles], rectangles
        return self._rectangles[groups]


class Channel:
    """Bytes that any of `senders` may send, laid out in a line of blocks; sender i sends [cuts[i], cuts[i + 1]).

    Near targets are one block, so that all of them receive a rectangle from the same sender, which packs it once. Far
    targets are one block each, so that each receives most of its bytes from one sender.
    """

    def __init__(self, piece_set: PieceSet, senders: list[int], nbytes: int, near: list[Target] | None = None) -> None:
        self.senders = senders
        self.nbytes = nbytes
        self.shares = [nbytes, *([0] * (len(senders) - 1))]
        self.is_far = near is None
        self._piece_set = piece_set
        self._near = near

    @cached_property
    def cuts(self) -> list[int]:
        """Where the shares end, moved to the nearest end of a row."""
        return [self._snapped(end) for end in accumulate(self.shares, initial=0)]

    def transfers_from(self, rank: int) -> Iterator[Transfer]:
        sender = self.senders.index(rank)
        return self._transfers(self.cuts[sender], self.cuts[sender + 1])

    def transfers_to(self, target: Target) -> Iterator[Transfer]:
        number = self._block_of[target]
        bounds = self._starts[number : number + 2]
        return (transfer for transfer in self._transfers(*bounds) if transfer.target == target)

    def transfers(self) -> Iterator[Transfer]:
        return self._transfers(0, self.nbytes)

    @cached_property
    def _blocks(self) -> list[tuple[Target, ...]]:
        return [(target,) for target in self._piece_set.remote_targets()] if self._near is None else [tuple(self._near)]

    @cached_property
    def _starts(self) -> list[int]:
        """Starts of the blocks, and the end of the last one."""
        return list(
            accumulate((sum(self._piece_set.nbytes[t.group] for t in block) for block in self._blocks), initial=0)
        )

    @cached_property
    def _block_of(self) -> dict[Target, int]:
        return {target: number for number, block in enumerate(self._blocks) for target in block}

    def _rectangles(self, number: int) -> tuple[list[int], list[Rectangle]]:
        return self._piece_set.rectangles(tuple(target.group for target in self._blocks[number]))

    def _snapped(self, position: int) -> int:
        number = bisect_right(self._starts, position) - 1
        inside = position - self._starts[number]
        if not inside:  # true for the end of the line, too
            return position
        starts, rectangles = self._rectangles(number)
        rectangle = rectangles[bisect_right(starts, inside) - 1]
        rows = (2 * (inside - rectangle.start) + rectangle.row_bytes) // (2 * rectangle.row_bytes)
        return self._starts[number] + rectangle.start + rows * rectangle.row_bytes

    def _transfers(self, low: int, high: int) -> Iterator[Transfer]:
        """Yield the transfers of the line between two bytes, cut by sender and by rectangle."""
        sender = bisect_right(self.cuts, low) - 1
        while low < high:
            while self.cuts[sender + 1] <= low:
                sender += 1
            end = min(high, self.cuts[sender + 1])
            for rectangle, targets, first, last in self._rows(low, end):
                for place, piece in rectangle.receivers:
                    yield self._piece_set.transfer(self.senders[sender], targets[place], piece, first, last)
            low = end

    def _rows(self, low: int, high: int) -> Iterator[tuple[Rectangle, tuple[Target, ...], int, int]]:
        """Yield (rectangle, its block, first row, end) of an interval that starts and ends at rows."""
        number = bisect_right(self._starts, low) - 1
        while number < len(self._blocks) and self._starts[number] < high:
            start = self._starts[number]
            starts, rectangles = self._rectangles(number)
            first = max(low - start, 0)
            for place in range(bisect_right(starts, first) - 1, len(rectangles)):
                rectangle = rectangles[place]
                if start + rectangle.start >= high:
                    break
                begin = max(first - rectangle.start, 0) // rectangle.row_bytes
                yield (
                    rectangle,
                    self._blocks[number],
                    begin,
                    min((high - start - rectangle.start) // rectangle.row_bytes, rectangle.rows),
                )
            number += 1


def by_node(ranks: Iterable[int], node_of: NodeOf) -> Nodes:
    found: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        found[_node(rank, node_of)].append(rank)
    return dict(found)


def _node(rank: int, node_of: NodeOf) -> int:
    return 0 if node_of is None else node_of[rank]


class Routes:
    """The sender of every transfer. Work grows with the number of ranks plus the number of pieces, not with their
    product: transfers are made one by one only for requested ranks."""

    def __init__(self, source: list[ShardGroup], destination: list[ShardGroup], node_of: NodeOf, itemsize: int) -> None:
        needs: dict[tuple[int, ...], dict[int, list[Piece]]] = defaultdict(lambda: defaultdict(list))
        for number, pieces in enumerate(cut(source, destination)):
            for piece in pieces:
                needs[piece.holders][number].append(piece)
        places = [by_node(group.ranks, node_of) for group in destination]
        piece_sets = [
            PieceSet({number: source[number].ranks for number in holders}, dict(pieces_of), places, node_of, itemsize)
            for holders, pieces_of in needs.items()
        ]
        self._channels = [channel for piece_set in piece_sets for channel in piece_set.channels]
        shares = balanced([Demand(channel.senders, channel.nbytes) for channel in self._channels])
        for channel, channel_shares in zip(self._channels, shares, strict=True):
            channel.shares = channel_shares

        self._targets: dict[int, list[Target]] = defaultdict(list)  # by rank
        for number, group in enumerate(destination):
            for rank in group.ranks:
                self._targets[rank].append(Target(number, rank))
        self._sets_for_group: list[list[PieceSet]] = [[] for _ in destination]
        self._sets_of_rank: dict[int, list[PieceSet]] = defaultdict(list)  # by holder's rank
        for piece_set in piece_sets:
            for number in piece_set.needs:
                self._sets_for_group[number].append(piece_set)
            for rank in piece_set.place:
                self._sets_of_rank[rank].append(piece_set)
        self._needed = [
            sum(piece_set.nbytes[number] for piece_set in sets) for number, sets in enumerate(self._sets_for_group)
        ]

    def transfers(self) -> Iterator[Transfer]:
        """Yield all transfers between ranks."""
        for channel in self._channels:
            yield from channel.transfers()

    def transfers_of(self, rank: int) -> Iterator[Transfer]:
        """Yield the transfers that `rank` sends or receives."""
        for piece_set in self._sets_of_rank.get(rank, ()):
            for channel in piece_set.channels_from(rank):
                yield from channel.transfers_from(rank)
        for target in self._targets.get(rank, ()):
            for piece_set in self._sets_for_group[target.group]:
                if rank not in piece_set.place:
                    yield from piece_set.channel_to(rank).transfers_to(target)

    def copies(self, rank: int) -> Iterator[Transfer]:
        """Yield what `rank` needs and has."""
        for piece_set, target in self._local_sets(rank):
            for piece in piece_set.needs[target.group]:
                yield piece_set.transfer(rank, target, piece, 0, piece.rows)

    def held(self, rank: int) -> int:
        """Return the bytes of what `rank` needs and has."""
        return sum(piece_set.nbytes[target.group] for piece_set, target in self._local_sets(rank))

    def missing(self, rank: int) -> int:
        """Return the bytes of what `rank` needs and does not have."""
        return sum(self._needed[target.group] for target in self._targets.get(rank, ())) - self.held(rank)

    def sent(self) -> dict[int, int]:
        """Return bytes by sender."""
        total: dict[int, int] = defaultdict(int)
        for channel in self._channels:
            for sender, start, end in zip(channel.senders, channel.cuts, channel.cuts[1:], strict=False):
                total[sender] += end - start
        return dict(total)

    def cross_node_bytes(self) -> int:
        return sum(channel.nbytes for channel in self._channels if channel.is_far)

    def _local_sets(self, rank: int) -> Iterator[tuple[PieceSet, Target]]:
        for target in self._targets.get(rank, ()):
            for piece_set in self._sets_of_rank.get(rank, ()):
                if target.group in piece_set.needs:
                    yield piece_set, target
