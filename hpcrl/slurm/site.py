"""The site file: settings that are the same for every job on one machine.

account: abc123
partition: gpu
gpu_directive: gres
container: {kind: apptainer, image: /project/abc123/tensorrt_llm.sif, mounts: [/project/abc123]}
interface: hsn0
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat

from hpcrl.config import yaml_core
from hpcrl.config.paths import NodePath, PathStr, in_bash
from hpcrl.config.problems import validated
from hpcrl.config.schema import SbatchOption, Section, SlurmValue, WallTime
from hpcrl.config.yaml_core import ConfigError, Node
from hpcrl.sandbox.foreign_files import MOST_CONFIG, read_text

VARIABLE = "HPCRL_SITE"
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]


def _image(image: str) -> str:
    """A file's path, or a name such as docker://ubuntu, which is kept."""
    is_file = image.startswith(("/", "./", "../")) or os.path.exists(image)
    return os.path.abspath(image) if is_file else image


def _mount(mount: str) -> str:
    outside, colon, inside = mount.partition(":")
    return f"{os.path.abspath(outside)}{colon}{inside}"


def _path_on_node(path: str) -> str:
    """Check a path that the script puts between double quotes: variables are the only expansion in it."""
    if not re.fullmatch(r"(?=/|\$\{)([A-Za-z0-9_./-]|\$\{\w+:(-[A-Za-z0-9_./-]+|\?[a-z, ]+)\})+", in_bash(path)):
        raise ValueError("an absolute path of letters, digits, _ . / - and $NAME or ${NAME}")
    return path


class ContainerConfig(Section):
    kind: Literal["none", "apptainer", "singularity", "pyxis"] = Field("none", description="how containers are started")
    image: Annotated[PathStr, AfterValidator(_image)] | None = Field(
        None, description="image file, or what Pyxis or Apptainer takes"
    )
    mounts: list[Annotated[PathStr, AfterValidator(_mount)]] = Field(
        default_factory=list, description="folders that jobs need, each PATH or PATH:INSIDE"
    )


class SiteConfig(Section):
    """Values of `job:` have priority over these. Paths may be relative to the working directory of submit, whose
    environment expands them; `environment` too."""

    account: SlurmValue | None = Field(None, description="account that pays")
    partition: SlurmValue | None = Field(None, description="partition")
    qos: SlurmValue | None = Field(None, description="quality of service")
    constraint: SlurmValue | None = Field(None, description="features that nodes must have")
    gpu_directive: Literal["gpus-per-node", "gres", "none"] = Field(
        "gpus-per-node", description="option that requests GPUs: --gpus-per-node=8, --gres=gpu:8, or none"
    )
    gpu_type: SlurmValue | None = Field(None, description="type of GPU in that directive, such as a100")
    mpi: SlurmValue | None = Field(None, description="for srun --mpi=; null: by the MPI library that Python loads")
    modules: list[SlurmValue] = Field(default_factory=list, description="modules to load")
    venv: Annotated[PathStr, AfterValidator(os.path.abspath)] | None = Field(
        None, description="virtual environment; null: the one in which submit runs"
    )
    environment: dict[VariableName, PathStr] = Field(default_factory=dict, description="further variables of the job")
    container: ContainerConfig = Field(default_factory=ContainerConfig, description="container")
    scratch: Annotated[NodePath, AfterValidator(_path_on_node)] | None = Field(
        None,
        description="folder on every node for temporary files (TMPDIR), may name the job's variables; null: the node's",
    )
    interface: SlurmValue | None = Field(None, description="network interface; null: chosen on the node")
    extra_sbatch: list[SbatchOption] = Field(default_factory=list, description="further options of sbatch")
    max_time: WallTime | None = Field(
        None, description="longest wall time that job.time=auto asks for, [D-]HH:MM:SS; null: there is no limit"
    )
    charge_factor: NonNegativeFloat = Field(1.0, description="what one node-hour costs, in the site's own unit")


def find_site(option: str | None, environ: Mapping[str, str]) -> Path | None:
    """Return the file of --site or $HPCRL_SITE, else ~/.config/hpcrl/site.yaml if it exists."""
    named = option or environ.get(VARIABLE)
    if named:
        return Path(named)
    default = Path(os.path.expanduser("~/.config/hpcrl/site.yaml"))
    return default if default.exists() else None


def load_site(path: Path | None) -> SiteConfig:
    """Read the site file, or return defaults. Raises ConfigError with a line for each mistake."""
    if path is None:
        return SiteConfig()
    try:
        text = read_text(os.path.realpath(path), most=MOST_CONFIG).removeprefix("\ufeff")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"site file {path} cannot be read: {error}; use --site or {VARIABLE} for another") from None
    tree = yaml_core.parse(text, str(path))
    return validated(tree if tree.value is not None else Node({}, str(path)), SiteConfig)
