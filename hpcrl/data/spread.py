"""Work on pieces of a list that the ranks share out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from hpcrl.runtime.world import World

Piece = TypeVar("Piece")
Result = TypeVar("Result")


def spread(world: World | None, pieces: Sequence[Piece], work: Callable[[Piece], Result]) -> list[Result]:
    """Return `work(piece)` for each piece, in order, on every rank; collective over `world`.

    Each piece is worked on by one rank, `world.size` pieces at a time, and its result is sent to the others: a rank
    holds results of others in pickled form for one such round only. Without a world, all is done here.

    Raises:
        InputError: on all ranks alike, where `work` raises a user error on any of them.
    """
    if world is None or world.size == 1:
        return _each(work, pieces)
    found: list[Result] = []
    for start in range(world.rank, world.rank + len(pieces), world.size):
        mine = pieces[start : start + 1]  # none, where the last round has no piece for this rank
        results = world.run_collectively(partial(_each, work, mine))
        found += [result for done in world.all_gather_object(results) for result in done]
    return found


def _each(work: Callable[[Piece], Result], pieces: Sequence[Piece]) -> list[Result]:
    return [work(piece) for piece in pieces]
