"""`@register`: how a worker method is called from rank 0, and which columns it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hpcrl.grid.layout import Layout

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class DispatchMode:
    """One way of spreading a call over a role's ranks.

    `split(layout, args, kwargs)` gives the arguments of every rank that runs the method, keyed by world rank;
    `reporters(layout)` names the ranks whose results come back, in order; `collect(results)` makes the call's value.
    With `takes_batch`, the first argument is a DataProto whose rows are divided over the replicas and whose columns
    move from owner to owner; it is left out of `args`. With `returns_batch`, the results are a DataProto whose written
    columns stay on the ranks, and `collect` is not used.
    """

    name: str
    split: Callable[[Layout, tuple[Any, ...], dict[str, Any]], dict[int, Arguments]]
    reporters: Callable[[Layout], Sequence[int]]
    collect: Callable[[list[Any]], Any] = list
    takes_batch: bool = False
    returns_batch: bool = False


def _to_all(layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Arguments]:
    return dict.fromkeys(layout.ranks, (args, kwargs))


def _to_first(layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Arguments]:
    return {layout.ranks[0]: (args, kwargs)}


def _one_each(layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Arguments]:
    _check_lengths(args, kwargs, layout.size, "one entry per rank")
    return {rank: _pick(args, kwargs, index) for index, rank in enumerate(layout.ranks)}


def _one_per_replica(layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Arguments]:
    _check_lengths(args, kwargs, layout.dp, "one entry per data-parallel replica")
    return {rank: _pick(args, kwargs, layout.coord(rank).dp) for rank in layout.ranks}


def _pick(args: tuple[Any, ...], kwargs: dict[str, Any], index: int) -> Arguments:
    return tuple(arg[index] for arg in args), {key: value[index] for key, value in kwargs.items()}


def _check_lengths(args: tuple[Any, ...], kwargs: dict[str, Any], expected: int, meaning: str) -> None:
    for arg in (*args, *kwargs.values()):
        if len(arg) != expected:
            raise ValueError(f"this dispatch takes lists of {expected} ({meaning}), found one of {len(arg)}")


class Dispatch:
    """The built-in modes, under verl's names where it has them. `register_dispatch_mode` adds one of your own."""

    ONE_TO_ALL = DispatchMode("ONE_TO_ALL", _to_all, lambda layout: layout.ranks)
    RANK_ZERO = DispatchMode(
        "RANK_ZERO", _to_first, lambda layout: layout.ranks[:1], collect=lambda results: results[0]
    )
    ALL_TO_ALL = DispatchMode("ALL_TO_ALL", _one_each, lambda layout: layout.ranks)
    DP_COMPUTE = DispatchMode("DP_COMPUTE", _one_per_replica, lambda layout: layout.homes)
    DP_COMPUTE_PROTO = DispatchMode(
        "DP_COMPUTE_PROTO", _to_all, lambda layout: layout.homes, takes_batch=True, returns_batch=True
    )
    DP_COMPUTE_METRIC = DispatchMode("DP_COMPUTE_METRIC", _to_all, lambda layout: layout.homes, takes_batch=True)
    # Orders: nobody reports, and nothing is to be got.
    ORDER_ALL = DispatchMode("ORDER_ALL", _to_all, lambda layout: ())
    DP_ORDER = DispatchMode("DP_ORDER", _to_all, lambda layout: (), takes_batch=True)


def register_dispatch_mode(mode: DispatchMode) -> DispatchMode:
    """Make `mode` available as `Dispatch.<name>`."""
    if hasattr(Dispatch, mode.name):
        raise ValueError(f"dispatch mode {mode.name} exists already; choose another name")
    setattr(Dispatch, mode.name, mode)
    return mode


@dataclass(frozen=True)
class Registration:
    """What the controller knows of a worker method."""

    mode: DispatchMode
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    group_by: str | None
    homes_only: bool
    meanwhile: bool
    phase: str | None
    updates: bool
    skip_if: str | None


def register(
    mode: DispatchMode,
    *,
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
    group_by: str | None = None,
    homes_only: bool = False,
    meanwhile: bool = False,
    phase: str | None = None,
    updates: bool = False,
    skip_if: str | None = None,
) -> Callable[[Method], Method]:
    """Make a worker method callable from rank 0.

    Args:
        mode: how arguments and results are spread over the role's ranks.
        reads: columns that the method needs, token-level or sample-level; `name?` is read where the batch has it.
        writes: token-level columns that it returns; they stay where they were made. `name?` may be left out, by all
            replicas alike.
        homes_only: run on the home rank of each replica alone, for work on columns that needs no model.
        group_by: a sample-level column; rows with equal entries go to the same replica.
        meanwhile: may run inside a long method that attends to its desk, for the home alone and when all rows that it
            reads are there already: then it waits for no other rank.
        phase: phase of a step whose time (`timing_s/<phase>`) includes the wait for the method; None: its name.
        updates: changes a model, so that a step cannot be repeated once the method has begun.
        skip_if: key of meta_info; in a job's loop the call is not issued for a batch that has it.
    """
    if (reads or writes or group_by or homes_only) and not mode.takes_batch:
        raise ValueError(f"{mode.name} moves no batch, so it has no columns to read or write")
    if meanwhile and not homes_only:
        raise ValueError("meanwhile=True is for methods of the home alone; set homes_only=True")

    def mark(method: Method) -> Method:
        method.registration = Registration(  # type: ignore[attr-defined]
            mode, tuple(reads), tuple(writes), group_by, homes_only, meanwhile, phase, updates, skip_if
        )
        return method

    return mark


def registration_of(worker: type, method: str) -> Registration:
    found = getattr(getattr(worker, method, None), "registration", None)
    if found is None:
        known = sorted(name for name in dir(worker) if hasattr(getattr(worker, name), "registration"))
        raise AttributeError(f"{worker.__name__} has no registered method {method!r}; it has {', '.join(known)}")
    return found
