"""How moves are cut to a bounded size and laid one behind the other in a buffer: no torch, no communication."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hpcrl.reshard.planner import Move


class Part(NamedTuple):
    """A move, or a piece of one, and the byte of the buffer where its values start."""

    move: Move
    offset: int


@dataclass
class Page:
    """What a sender lays into its window at once, and the ranks that read from it."""

    parts: list[Part] = field(default_factory=list)
    readers: set[int] = field(default_factory=set)
    nbytes: int = 0


class Direction(NamedTuple):
    """Where a reader finds a piece of its n-th move from a sender; all integers."""

    move: int
    row: int  # first row and column of the piece, counted in the move
    col: int
    rows: int
    cols: int
    page: int
    offset: int


def messages(moves: Iterable[Move], limit: int) -> list[list[Part]]:
    """`moves` in order as buffers of at most `limit` bytes; both ends of a pair cut alike."""
    cut: list[list[Part]] = [[]]
    used = 0
    for move in moves:
        for piece in pieces(move, limit):
            if used + piece.nbytes > limit and cut[-1]:
                cut.append([])
                used = 0
            cut[-1].append(Part(piece, used))
            used += piece.nbytes
    return cut if cut[-1] else []


def size(parts: Sequence[Part]) -> int:
    """Bytes of a buffer that holds `parts`."""
    return parts[-1].offset + parts[-1].move.nbytes if parts else 0


def pages(sends: dict[int, list[Move]], limit: int) -> tuple[list[Page], dict[int, list[Direction]]]:
    """Pages of at most `limit` bytes with every rectangle in one of them once, however many ranks read it; and each
    reader's directions, in the order of its moves."""
    published: list[Page] = []
    places: dict[tuple[str, int, int, int, int], list[tuple[int, Part]]] = {}
    directions: dict[int, list[Direction]] = {}
    for reader, moves in sends.items():
        directions[reader] = []
        for number, move in enumerate(moves):
            rectangle = (move.name, move.src_row, move.src_col, move.rows, move.cols)
            if rectangle not in places:
                places[rectangle] = [_publish(piece, published, limit) for piece in pieces(move, limit)]
            for page, part in places[rectangle]:
                published[page].readers.add(reader)
                piece = part.move
                directions[reader].append(
                    Direction(
                        number,
                        piece.src_row - move.src_row,
                        piece.src_col - move.src_col,
                        piece.rows,
                        piece.cols,
                        page,
                        part.offset,
                    )
                )
    return published, directions


def directed(moves: Sequence[Move], directions: Iterable[Direction]) -> dict[int, list[Part]]:
    """Page -> the pieces that a reader takes from it, given its moves from that sender."""
    found: dict[int, list[Part]] = {}
    for direction in directions:
        whole = moves[direction.move]
        piece = _piece(whole, direction.row, direction.col, direction.rows, direction.cols)
        found.setdefault(direction.page, []).append(Part(piece, direction.offset))
    return found


def pieces(move: Move, limit: int) -> Iterator[Move]:
    """`move` cut by rows into pieces of at most `limit` bytes, and by columns where one row is more than that."""
    if move.nbytes <= limit:
        yield move
        return
    itemsize = move.nbytes // (move.rows * move.cols)
    rows = max(1, limit // (move.cols * itemsize))
    cols = min(move.cols, max(1, limit // itemsize))
    for row in range(0, move.rows, rows):
        for col in range(0, move.cols, cols):
            yield _piece(move, row, col, min(rows, move.rows - row), min(cols, move.cols - col))


def _piece(move: Move, row: int, col: int, rows: int, cols: int) -> Move:
    return move._replace(
        src_row=move.src_row + row,
        src_col=move.src_col + col,
        dst_row=move.dst_row + row,
        dst_col=move.dst_col + col,
        rows=rows,
        cols=cols,
        nbytes=move.nbytes // (move.rows * move.cols) * rows * cols,
    )


def _publish(piece: Move, published: list[Page], limit: int) -> tuple[int, Part]:
    """Lay `piece` behind the last one; its page and place."""
    if not published or published[-1].nbytes + piece.nbytes > limit:
        published.append(Page())
    page = published[-1]
    part = Part(piece, page.nbytes)
    page.parts.append(part)
    page.nbytes += piece.nbytes
    return len(published) - 1, part
