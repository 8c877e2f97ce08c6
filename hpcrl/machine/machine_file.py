"""What a machine can do, as data: rates, bandwidths and latencies of a rank, its node and the network.

`configs/machines/*.yaml` describe well-known ones from published figures; `hpcrl check --job --machine FILE` writes the
one that it runs on, with coefficients that are fitted to measured times.
"""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from hpcrl.config import yaml_core
from hpcrl.config.paths import TEMPLATES, is_machine_file
from hpcrl.config.problems import validated
from hpcrl.config.schema import Section
from hpcrl.config.yaml_core import ConfigError
from hpcrl.sandbox.foreign_files import MOST_CONFIG, read_text
from hpcrl.sandbox.new_files import draft_of

MACHINES = TEMPLATES / "configs" / "machines"
UNKNOWN_SPREAD = 1.1  # relative error of a phase that was not measured: that of the figures in docs/performance.md
Dtype = Literal["float32", "bfloat16", "float8"]
Ranks = Annotated[PositiveInt, Field(strict=False)]  # keys of YAML files are text


class Rate(Section):
    """Operations per second of a kind of work. A product of few rows is slower: `half_rows` is Hockney's n1/2 (Hockney
    and Jesshope 1988), the rows at which half of `flops` is reached."""

    flops: PositiveFloat = Field(description="operations per second of one rank, if no other computes")
    half_rows: NonNegativeFloat = Field(0.0, description="rows of a product at which half of flops is reached")


class Link(Section):
    """Messages between two ranks: `latency` + bytes / `bandwidth` (Hockney's model)."""

    latency: NonNegativeFloat = Field(description="seconds of an empty message")
    bandwidth: PositiveFloat = Field(description="bytes per second in one direction, of one rank")


class Device(Section):
    """What one rank computes with: a GPU, or its share of a node's cores."""

    kind: Literal["gpu", "cpu"]
    memory_gib: PositiveFloat | None = Field(None, description="of one GPU; null: the host's")
    matmul: dict[Dtype, Rate] = Field(description="matrix products, by dtype", min_length=1)
    attention: dict[Dtype, Rate] = Field(description="attention over long sequences, by dtype", min_length=1)
    memory_bandwidth: PositiveFloat = Field(description="bytes per second, read and written")
    launch: NonNegativeFloat = Field(description="seconds of a host for an operator, in the mean, whatever it computes")
    replay: NonNegativeFloat = Field(0.0, description="the same within a CUDA graph; 0: there are no graphs")


class Node(Section):
    ranks: PositiveInt = Field(description="ranks that it is made for")
    cores: PositiveFloat | None = Field(
        None, description="ranks that can compute at full speed at the same time; null: all, each has a GPU"
    )
    contention: NonNegativeFloat = Field(
        0.0, description="seconds that a collective takes longer where a node has more ranks than cores"
    )
    host_copy: PositiveFloat = Field(description="bytes per second between a device and host memory, of one rank")
    network: PositiveFloat | None = Field(None, description="bytes per second that all ranks share; null: no limit")
    write: PositiveFloat = Field(description="bytes per second written to the shared file system")
    read: PositiveFloat = Field(description="bytes per second read from it")


class Links(Section):
    inside: Link = Field(description="between ranks of a node")
    between: Link = Field(description="between ranks of two nodes")
    group: dict[Ranks, NonNegativeFloat] = Field(
        default_factory=dict,
        description="ranks of a group -> bus bandwidth of its all-reduce as a share of the link's; linear between them",
    )


class Machine(Section):
    """A machine file."""

    name: str
    sources: list[str] = Field(description="where the figures are from")
    measured: bool = Field(False, description="whether the figures were measured on it")
    device: Device
    node: Node
    links: Links
    efficiency: dict[str, PositiveFloat] = Field(
        default_factory=dict,
        description="by phase, the ideal time as a share of the time that it takes, both without communication; "
        "`hpcrl plan --calibrate` fits them",
    )
    communication: dict[str, PositiveFloat] = Field(
        default_factory=dict, description="the same of a phase's communication; a phase that is missing has 1"
    )
    spread: dict[str, NonNegativeFloat] = Field(
        default_factory=dict,
        description="by phase, the relative standard error of these; for a phase that is missing, 1.1",
    )

    def caveat(self) -> str | None:
        """What a table says of predictions for a machine that was not measured; None for one that was."""
        if self.measured:
            return None
        return f"an extrapolation: the figures of {self.name} are published ones, and were not measured on it"


def read_machine(name: str) -> Machine:
    """The machine of a file, or of `configs/machines/NAME.yaml`. Raises ConfigError, one line."""
    path = Path(name) if is_machine_file(name) else MACHINES / f"{name}.yaml"
    try:
        text = read_text(os.path.realpath(path), most=MOST_CONFIG)
    except (OSError, UnicodeDecodeError) as error:
        known = sorted(file.stem for file in MACHINES.glob("*.yaml"))
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"expected a YAML file or one of {', '.join(known)}"
        raise ConfigError(f"no machine {name}: {getattr(error, 'strerror', None) or error}; {hint}") from None
    return validated(yaml_core.parse(text, str(path)), Machine)


DIGITS = 3  # that measurements are good for


def check_target(path: str, option: str = "--machine") -> None:
    """Raise ConfigError, one line, if a machine file cannot be written there.

    Args:
        option: the option that names it.
    """
    target = Path(path)
    if target.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{option}: found {path!r}, expected the name of a YAML file, such as machine.yaml")
    if target.is_dir():
        raise ConfigError(f"{option}: {path} is a folder; name a file in it")
    if not target.parent.is_dir():
        raise ConfigError(f"{option}: there is no folder {target.parent}; create it, or name another file")
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise ConfigError(f"{option}: {target.parent} cannot be written to: {error.strerror}") from None


def save_machine(path: str, figures: Mapping[str, Any]) -> str:
    """Write the machine file of measured figures, and return its name. An existing file is replaced atomically.

    Raises ConfigError, one line, if the figures are no machine, or if the file cannot be written.
    """
    target = Path(path)
    machine = {"name": target.stem, **_rounded(figures)}
    text = yaml_core.dump(machine)
    try:
        Machine.model_validate(yaml_core.parse(text, path).plain())
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"measured {key}={first['input']!r}: {first['msg']}; measure again") from None
    try:
        with draft_of(target) as draft:
            draft.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--machine: {path} cannot be written: {error.strerror}") from None
    return path


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(intercept, slope) of seconds = intercept + slope * size, both at least 0.

    Least squares of the relative errors, so that short times count as much as long ones. With one point the line goes
    through 0. Raises ValueError without points, or if a time is not positive.
    """
    if not sizes or min(seconds) <= 0:
        raise ValueError(f"a fit needs positive times, found {list(seconds)}")
    weights = [1 / second**2 for second in seconds]
    total = sum(weights)
    mean_size = sum(weight * size for weight, size in zip(weights, sizes, strict=True)) / total
    mean_time = sum(weight * second for weight, second in zip(weights, seconds, strict=True)) / total
    points = list(zip(weights, sizes, seconds, strict=True))
    spread = sum(weight * (size - mean_size) ** 2 for weight, size, _ in points)
    slope = sum(weight * (size - mean_size) * (second - mean_time) for weight, size, second in points) / (spread or 1.0)
    intercept = mean_time - slope * mean_size
    if slope <= 0 and spread > 0:  # longer for smaller sizes: noise
        return mean_time, 0.0
    if intercept < 0 or spread == 0:
        squares = sum(weight * size**2 for weight, size, _ in points)
        return 0.0, sum(weight * size * second for weight, size, second in points) / squares
    return intercept, slope


def fit_rate(rows: Sequence[int], seconds: Sequence[float], ops_per_row: float) -> tuple[float, float]:
    """(flops, half_rows) of seconds = (rows + half_rows) * ops_per_row / flops (Hockney and Jesshope 1988).

    If more rows take no longer, the rate is that of the largest product, and half_rows is 0.
    """
    intercept, slope = fit_line(rows, seconds)
    if slope == 0:
        return ops_per_row * rows[-1] / seconds[-1], 0.0
    return ops_per_row / slope, intercept / slope


def fit_link(nbytes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """(latency, bandwidth) of seconds = latency + bytes / bandwidth (Hockney 1994).

    If larger messages take no longer, the bandwidth is that of the largest message.
    """
    latency, slope = fit_line(nbytes, seconds)
    return latency, 1 / slope if slope else nbytes[-1] / seconds[-1]


def bus_bandwidth(ranks: int, nbytes: int, seconds: float) -> float:
    """Bytes per second that each rank of an all-reduce sends and receives at least: 2 (n - 1) / n * bytes / seconds, as
    nccl-tests define it."""
    return 2 * (ranks - 1) / ranks * nbytes / seconds


def group_sizes(ranks: int) -> list[int]:
    """2, 4, 8, ... up to `ranks`, and `ranks` itself."""
    sizes = [2**power for power in range(1, ranks.bit_length()) if 2**power <= ranks]
    return sizes if ranks < 2 or ranks in sizes else [*sizes, ranks]


def shared_cores(single: float, together: Sequence[float]) -> float:
    """Ranks that compute at full speed at the same time: the sum of the rates `together` in units of the rate `single`
    of one rank while the others wait, at most the number of ranks."""
    return min(sum(together) / single, float(len(together)))


def crowding(size: int, nodes: Sequence[Sequence[int]], cores: float | None) -> float:
    """How much longer the first `size` ranks take that compute at the same time, where the ranks of a node share so
    many cores; None: each has its own."""
    if cores is None:
        return 1.0
    return max(1.0, *(sum(rank < size for rank in ranks) / cores for ranks in nodes))


def ring_bandwidth(size: int, nodes: Sequence[Sequence[int]], inside: float, between: float, has_rings: bool) -> float:
    """Bandwidth of the links that a collective of the first `size` ranks uses, of which the all-reduce has a share.

    Args:
        nodes: the ranks of each node.
        has_rings: whether, between nodes, each rank of a node has a ring of its own (NCCL's channels), up to the
            bandwidth inside a node.
    """
    each = [count for ranks in nodes if (count := sum(rank < size for rank in ranks))]
    if len(each) == 1:
        return inside
    return ring_link(inside, between, min(each) if has_rings else 1)


def ring_link(inside: float, between: float, rings: int) -> float:
    """Bandwidth between nodes of so many rings that share the bytes, until the links inside a node limit them."""
    return min(inside, rings * between) if rings > 1 else between
