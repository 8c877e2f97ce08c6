"""The site file: settings that are the same for every job on one machine.

`configs/sites/*.yaml` are profiles of well-known machines, which a site file may extend:

extends: alps
account: abc123
container: {image: /project/abc123/tensorrt_llm.toml}
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from hpcrl.config import yaml_core
from hpcrl.config.loader import merge
from hpcrl.config.paths import TEMPLATES, NodePath, PathStr, in_bash
from hpcrl.config.problems import describe, validated
from hpcrl.config.schema import SbatchOption, Section, SlurmValue, WallTime, key, subsection
from hpcrl.config.yaml_core import ConfigError, Node
from hpcrl.sandbox.foreign_files import MOST_CONFIG, read_text

SITES = TEMPLATES / "configs" / "sites"
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
    kind: Literal["none", "apptainer", "singularity", "pyxis", "edf"] = key(
        "none", "how containers are started; edf: by the container engine of CSCS"
    )
    image: Annotated[PathStr, AfterValidator(_image)] | None = key(
        None, "image file, or what Pyxis or Apptainer takes; of edf: the environment definition file"
    )
    mounts: list[Annotated[PathStr, AfterValidator(_mount)]] = key(
        [], "folders that jobs need, each PATH or PATH:INSIDE"
    )


class FabricConfig(Section):
    """What `hpcrl check --job` compares the network between nodes with; null: it does not."""

    net: str | None = key(None, "network that NCCL names in its log, such as AWS Libfabric or IB")
    all_reduce_gb_s: PositiveFloat | None = key(
        None, "bus bandwidth of a large all-reduce over two nodes, in GB/s per GPU"
    )
    point_to_point_gb_s: PositiveFloat | None = key(None, "bandwidth from a GPU to one of another node, in GB/s")


class SiteConfig(Section):
    """Values of `job:` have priority over these. Paths may be relative to the working directory of submit, whose
    environment expands them; `environment` too."""

    account: SlurmValue | None = key(None, "account that pays")
    partition: SlurmValue | None = key(None, "partition")
    qos: SlurmValue | None = key(None, "quality of service")
    constraint: SlurmValue | None = key(None, "features that nodes must have")
    gpu_directive: Literal["gpus-per-node", "gres", "none"] = key(
        "gpus-per-node", "option that requests GPUs: --gpus-per-node=8, --gres=gpu:8, or none"
    )
    gpu_type: SlurmValue | None = key(None, "type of GPU in that directive, such as a100")
    gpus_per_node: PositiveInt | None = key(None, "GPUs of a node, as Slurm counts them")
    cpu_bind: SlurmValue | None = key(None, "for srun --cpu-bind=; null: cores")
    mpi: SlurmValue | None = key(None, "for srun --mpi=; null: by the MPI library that Python loads")
    modules: list[SlurmValue] = key([], "modules to load")
    venv: Annotated[PathStr, AfterValidator(os.path.abspath)] | None = key(
        None, "virtual environment; null: the one in which submit runs"
    )
    environment: dict[VariableName, PathStr] = key({}, "variables of the ranks; exported ones count more")
    container: ContainerConfig = subsection(ContainerConfig, "container")
    scratch: Annotated[NodePath, AfterValidator(_path_on_node)] | None = key(
        None, "folder on every node for temporary files (TMPDIR), may name the job's variables; null: the node's"
    )
    interface: SlurmValue | None = key(None, "network interface; null: chosen on the node")
    extra_sbatch: list[SbatchOption] = key([], "further options of sbatch")
    max_time: WallTime | None = key(
        None, "longest wall time that job.time=auto asks for, [D-]HH:MM:SS; null: there is no limit"
    )
    charge_factor: NonNegativeFloat = key(1.0, "what one node-hour costs, in the site's own unit")
    fabric: FabricConfig = subsection(FabricConfig, "what the network is expected to do")


def find_site(option: str | None, environ: Mapping[str, str]) -> Path | None:
    """Return the file of --site or $HPCRL_SITE, else ~/.config/hpcrl/site.yaml if it exists. Raises ConfigError for the
    name of no profile."""
    named = option or environ.get(VARIABLE)
    if named:
        is_file = named.endswith((".yaml", ".yml")) or os.sep in named or os.path.exists(named)
        return Path(named) if is_file else profile(named)
    default = Path(os.path.expanduser("~/.config/hpcrl/site.yaml"))
    return default if default.exists() else None


def profile(name: str) -> Path:
    """Return `configs/sites/NAME.yaml`. Raises ConfigError, one line, which lists the names."""
    known = {path.stem: path for path in sorted(SITES.glob("*.yaml"))}
    if name not in known:
        raise ConfigError(f"no site {name}; expected a YAML file or one of {', '.join(known)}")
    return known[name]


def load_site(path: Path | None) -> SiteConfig:
    """Read the site file, or return defaults. Raises ConfigError with a line for each mistake."""
    if path is None:
        return SiteConfig()
    tree = _read(path)
    base = tree.value.pop("extends", None) if isinstance(tree.value, dict) else None
    if base is not None:
        if not isinstance(base.value, str):
            raise ConfigError(f"{base.place}: extends is {describe(base)}; expected the name of a site")
        tree = merge(_read(profile(base.value)), tree)
    return validated(tree, SiteConfig)


def _read(path: Path) -> Node:
    try:
        text = read_text(os.path.realpath(path), most=MOST_CONFIG).removeprefix("\ufeff")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"site file {path} cannot be read: {error}; use --site or {VARIABLE} for another") from None
    tree = yaml_core.parse(text, str(path))
    return tree if tree.value is not None else Node({}, str(path))
