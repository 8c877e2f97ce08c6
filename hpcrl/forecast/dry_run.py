"""`HPCRL_DRY_RUN=1`: the ranks of a job come up, say where they would be in each role, agree on it, and leave.

It proves that the launcher makes one world of the right size and that the placement is what the user meant, on any
machine: neither torch nor a GPU, data or weights are needed, and ranks other than 0 import next to nothing.
"""

from __future__ import annotations

import os
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from hpcrl.config.derive import JobDescription
from hpcrl.config.paths import missing
from hpcrl.runtime import exits
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.layout import GROUP_DIMS, Coord, Layout
from hpcrl.runtime.mpi import all_gather_object, broadcast_object, run_collectively
from hpcrl.runtime.user_code import has_imported
from hpcrl.runtime.world import abort, finish, finish_with_error, start_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

VARIABLE = "HPCRL_DRY_RUN"
SPANS = ("tp", "pp", "dp")  # groups whose place in the machine decides how fast a job is
MIB = 2**20


class Placement(NamedTuple):
    """The placement that rank 0 has read, as plain data: no other rank needs YAML or the schema."""

    layouts: dict[str, dict[str, Any]]  # role -> fields of Layout
    asked: int  # job.nodes * job.ntasks_per_node
    missing: list[tuple[str, str]]  # (config key, path)


class Place(NamedTuple):
    """One rank's coordinates and groups."""

    node: str
    coords: dict[str, Coord]  # role -> coordinates, of the roles that it is in
    groups: dict[tuple[str, str], str]  # (role, group) -> digest of the group's members in order
    imported: list[str]  # heavy packages that this rank has loaded
    peak: int  # bytes of memory at most


def requested(environ: Mapping[str, str]) -> bool:
    return environ.get(VARIABLE) == "1"


def main(arguments: Sequence[str], load_job: Callable[[], JobDescription]) -> NoReturn:
    """Dry run of a job with these arguments, a YAML file and overrides, on the ranks that the launcher started.
    Collective; `load_job` imports the job, on rank 0."""
    launched = dict(os.environ)  # an MPI library that starts may add variables of its own
    try:
        comm = start_mpi()
    except InputError as error:
        exits.exit_with_error(error)
    try:
        finish(_run(comm, lambda: _read(arguments, load_job(), comm.size, launched)))
    except BaseException as error:
        if getattr(error, "everywhere", False):
            finish_with_error(error, comm.rank)
        abort(error, rank=comm.rank, phase="dry run")


def _run(comm: MPI.Intracomm, read: Callable[[], Placement]) -> int:
    """The exit code, on every rank."""
    job: Placement = broadcast_object(comm, run_collectively(comm, lambda: read() if comm.rank == 0 else None))
    layouts = {role: Layout(**fields) for role, fields in job.layouts.items()}
    places = all_gather_object(comm, _place(comm, layouts))
    problems = disagreements(layouts, places) if comm.rank == 0 else []
    if comm.rank == 0:
        print("\n".join([*table(job, layouts, places, problems), *problems]))
    return broadcast_object(comm, exits.OTHER if problems else exits.DONE)


def started_by_launcher(environ: Mapping[str, str]) -> int | None:
    """Number of ranks that the launcher started, None if it does not set it."""
    if "OMPI_COMM_WORLD_SIZE" in environ:  # mpirun: Slurm's variables are those of its proxies
        return int(environ["OMPI_COMM_WORLD_SIZE"])
    count = environ.get("PMI_SIZE", environ.get("SLURM_STEP_NUM_TASKS", ""))
    return int(count) if count.isdigit() else None


def _read(arguments: Sequence[str], job: JobDescription, world_size: int, environ: Mapping[str, str]) -> Placement:
    """The job's placement, with the checks that need no torch."""

    started = started_by_launcher(environ)
    if started is not None and started != world_size:
        raise InputError(
            f"the launcher started {started} ranks, and the MPI world has {world_size}; "
            "give srun another --mpi= (`srun --mpi=list`)"
        )
    if not arguments:
        raise InputError("a dry run needs a YAML file")
    config = job.prepare(job.read_config(arguments[0], arguments[1:]))
    roles = job.check(config, world_size).roles
    fields = {name: role.grid for name, role in roles.items()}
    absent = [(key, file) for key, file in missing(config)]
    return Placement(fields, config.job.nodes * config.job.ntasks_per_node, absent)


def _place(comm: MPI.Intracomm, layouts: Mapping[str, Layout]) -> Place:
    from mpi4py import MPI

    mine = {role: layout for role, layout in layouts.items() if comm.rank in layout}
    groups = {
        (role, name): digest(layout.group_of(comm.rank, *dims))
        for role, layout in mine.items()
        for name, dims in GROUP_DIMS.items()
    }
    coords = {role: layout.coord(comm.rank) for role, layout in mine.items()}
    heavy = {"torch", "megatron", "transformers"}.intersection(sys.modules)
    imported = [] if has_imported() else sorted(heavy)  # a user's file may import what it needs
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Place(MPI.Get_processor_name(), coords, groups, imported, peak)


def digest(ranks: Sequence[int]) -> str:
    return blake2b(repr(tuple(ranks)).encode(), digest_size=8).hexdigest()


def disagreements(layouts: Mapping[str, Layout], places: Sequence[Place]) -> list[str]:
    """A line for every rank whose coordinates or groups differ from those that other ranks compute for it."""
    lines = []
    for role, layout in layouts.items():
        for rank in layout.ranks:
            coord = places[rank].coords.get(role)
            if coord is None or layout.rank_of(*coord) != rank:
                lines.append(f"wrong: rank {rank} is {role} {coord} by itself, and {layout.coord(rank)} by rank 0")
        for name, dims in GROUP_DIMS.items():
            for group in layout.groups(*dims):
                odd = [rank for rank in group if places[rank].groups.get((role, name)) != digest(group)]
                if odd:
                    lines.append(f"wrong: {role}'s group {name} of ranks {group} is another one for ranks {odd}")
    for rank, place in enumerate(places):
        if place.imported:
            lines.append(f"wrong: rank {rank} imported {', '.join(place.imported)}")
    return lines


def table(
    job: Placement, layouts: Mapping[str, Layout], places: Sequence[Place], problems: Sequence[str]
) -> Iterator[str]:
    """The table that rank 0 prints."""
    nodes = [place.node for place in places]
    per_node = sorted(set(Counter(nodes).values()))
    each = " or ".join(map(str, per_node))
    yield f"dry run: one world of {len(places)} ranks on {len(set(nodes))} node(s), {each} on each"
    width = max(map(len, layouts))
    yield f"  {'role':<{width}}  {'layout':<22}{'ranks':<14}" + "".join(f"{f'a {name} group':<22}" for name in SPANS)
    for role, layout in layouts.items():
        shape = f"tp {layout.tp}  pp {layout.pp}  dp {layout.dp}"
        ranks = f"{layout.size} from {layout.ranks[0]}"
        spans = "".join(f"{_span(layout, name, nodes):<22}" for name in SPANS)
        yield f"  {role:<{width}}  {shape:<22}{ranks:<14}{spans}".rstrip()
    last = len(places) - 1
    for rank in sorted({0, last}):
        where = []
        for role, coord in places[rank].coords.items():
            where.append(" ".join([role, *(f"{axis} {at}" for axis, at in coord._asdict().items() if axis != "cp")]))
        yield f"  rank {rank} on {nodes[rank]}: {'; '.join(where) or 'in no role'}"
    if not problems:
        peak = round(max(place.peak for place in places) / MIB)
        light = "" if "torch" in sys.modules else "none imported torch; "
        yield f"  all ranks agree on all coordinates and groups; {light}peak {peak} MiB per rank"
    if job.asked != len(places):
        yield f"  note: job.nodes * job.ntasks_per_node = {job.asked}, and {len(places)} ranks were started"
    for key, path in job.missing:
        yield f"  warning: {key}: {path} is not here"


def _span(layout: Layout, name: str, nodes: Sequence[str]) -> str:
    """Ranks of a group, and the nodes of the group that spans most."""
    groups = layout.groups(*GROUP_DIMS[name])
    size = len(groups[0])
    if size == 1:
        return "-"
    most = max(len({nodes[rank] for rank in group}) for group in groups)
    return f"{size} ranks, {most} node{'s' * (most > 1)}"
