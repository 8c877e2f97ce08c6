"""What a machine can do, as data: rates, bandwidths and latencies of a rank, its node and the network.

`configs/machines/*.yaml` describe well-known ones from published figures; `hpcrl check --job --machine FILE` writes the
one that it runs on.
"""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from hpcrl.config import yaml_core
from hpcrl.config.inputs import is_machine_file
from hpcrl.config.problems import validated
from hpcrl.config.schema import Section
from hpcrl.config.yaml_core import ConfigError
from hpcrl.sandbox.foreign_files import MOST_CONFIG, read_text
from hpcrl.sandbox.new_files import draft_of

PACKAGED = Path(__file__).resolve().parents[1] / "machines"  # of an installed package; setup.py's link in a checkout
MACHINES = PACKAGED if PACKAGED.is_dir() else PACKAGED.parents[1] / "configs" / "machines"
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
    """Raise ConfigError, one line, if a machine file cannot be written there. option: that names it."""
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


def save(path: str, figures: Mapping[str, Any]) -> str:
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
