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

from pydantic import AfterValidator, Field, NonNegativeFloat, ValidationError

from hpcrl.config import yaml_core
from hpcrl.config.schema import SbatchOption, Section, SlurmValue, WallTime
from hpcrl.config.yaml_core import ConfigError

VARIABLE = "HPCRL_SITE"
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]


def _without_variables(text: str) -> str:
    if "$" in text:
        raise ValueError(f"{text!r} contains '$'; only scratch may contain variables")
    return text


def _path(path: str) -> str:
    """Make a path absolute; the script quotes it and runs in another folder."""
    return os.path.abspath(os.path.expanduser(_without_variables(path)))


def _image(image: str) -> str:
    """A file's path, or a name such as docker://ubuntu, which is kept."""
    is_file = image.startswith(("/", "~", "./", "../")) or os.path.exists(image)
    return _path(image) if is_file else _without_variables(image)


def _mount(mount: str) -> str:
    outside, colon, inside = _without_variables(mount).partition(":")
    return f"{_path(outside)}{colon}{inside}"


def _path_on_node(path: str) -> str:
    """Check a path that the script puts between double quotes: variables are the only expansion in it."""
    if not re.fullmatch(r"(?=[/$])([A-Za-z0-9_./-]|\$[A-Za-z_][A-Za-z0-9_]*|\$\{[A-Za-z_][A-Za-z0-9_]*\})+", path):
        raise ValueError(
            f"found {path!r}; expected an absolute path of letters, digits, _ . / - and $NAME or ${{NAME}}"
        )
    return path


class ContainerConfig(Section):
    kind: Literal["none", "apptainer", "singularity", "pyxis"] = Field("none", description="how containers are started")
    image: Annotated[str, AfterValidator(_image)] | None = Field(
        None, description="image file, or what Pyxis or Apptainer takes"
    )
    mounts: list[Annotated[str, AfterValidator(_mount)]] = Field(
        default_factory=list, description="folders that jobs need, each PATH or PATH:INSIDE"
    )


class SiteConfig(Section):
    """Values of `job:` have priority over these. Paths may begin with ~ or be relative to the working directory of
    submit."""

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
    venv: Annotated[str, AfterValidator(_path)] | None = Field(
        None, description="virtual environment; null: .venv of the checkout"
    )
    environment: dict[VariableName, str] = Field(default_factory=dict, description="further variables of the job")
    container: ContainerConfig = Field(default_factory=ContainerConfig, description="container")
    scratch: Annotated[str, AfterValidator(_path_on_node)] | None = Field(
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
    """Read the site file, or return defaults. Raises ConfigError with one line for an invalid file."""
    if path is None:
        return SiteConfig()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"site file {path} cannot be read: {error}; use --site or {VARIABLE} for another") from None
    tree = yaml_core.parse(text, str(path))
    try:
        return SiteConfig.model_validate(tree.plain() or {})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        known = ", ".join(SiteConfig.model_fields)
        why = f"unknown key; expected one of {known}" if first["type"] == "extra_forbidden" else first["msg"]
        raise ConfigError(f"site file {path}: {key}: {why}") from None
