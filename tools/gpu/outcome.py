"""How a check ends that does not pass, and the table of one that does."""

from __future__ import annotations

from hpcrl.runtime.world import World


class Skip(Exception):
    """Says what the machine lacks. Raised inside a check by all ranks or by none."""


class Failed(Exception):
    """Says what was found and what was expected."""


def require(true: bool, line: str) -> None:
    if not true:
        raise Failed(line)


def print_head(world: World, *columns: str) -> None:
    print_row(world, *columns)
    if world.rank == 0:
        print(f"|---|{'---:|' * (len(columns) - 1)}", flush=True)


def print_row(world: World, *cells: object) -> None:
    if world.rank == 0:
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
