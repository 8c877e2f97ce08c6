"""Paths in YAML files and overrides: `~`, `$NAME`, `${NAME}` and, as in verl, `${oc.env:NAME}` and
`${oc.env:NAME,default}` are expanded.

A key of type `PathStr` is expanded where the config is read: on rank 0, or on the login node by `hpcrl submit`. A key
of type `NodePath` is expanded on each rank, because its variables, such as $TMPDIR, may differ from node to node.
`slurm/common.sh` has the same rule in bash (`hpcrl_path`).

`inputs` are the files that a job reads, by the config key that names them: for checks before a job queues and for
staging.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import AfterValidator, BeforeValidator, PlainSerializer

if TYPE_CHECKING:
    from hpcrl.config.schema import Config

_PACKAGED = Path(__file__).resolve().parents[1] / "templates"
IS_INSTALLED = _PACKAGED.is_dir()  # from a wheel, in which setup.py puts that folder
TEMPLATES = _PACKAGED if IS_INSTALLED else _PACKAGED.parents[1]  # contains configs/, slurm/ and docs/examples/

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_VARIABLE = re.compile(
    rf"\$(?:(?P<dollar>\$)|(?P<plain>{_NAME})"
    rf"|\{{(?:(?P<braced>{_NAME})|oc\.env:(?P<resolved>{_NAME})(?:,(?P<default>[^${{}}'\"\s]*))?)\}}|(?P<other>\{{))"
)


def expanded(path: str) -> str:
    """The path without variables and `~`; `$$` is a plain dollar sign.

    Raises ValueError, which says what was expected, for a variable that is unset or empty, an unknown user, and other
    expressions in braces.
    """
    return _home(_substitute(path, _value_of))


def literal(path: str) -> str:
    """Text that `expanded` reads as this path."""
    text = path.replace("$", "$$")
    return f"./{text}" if text.startswith("~") else text


def in_bash(path: str) -> str:
    """The path for bash, between double quotes. A variable that is unset there ends the script with a line."""
    unset = ":?scratch of the site file names it, and it is unset"
    return _substitute(path, lambda name, default: f"${{{name}{f':-{default}' if default else unset}}}")


def _substitute(path: str, value_of: Callable[[str, str], str]) -> str:
    """The path with `value_of(name, default)` in place of its variables."""

    def replacement(found: re.Match[str]) -> str:
        if found["dollar"]:
            return "$"
        if found["other"]:
            raise ValueError("${NAME}, ${oc.env:NAME} or ${oc.env:NAME,default} where braces follow a $, or $$ for a $")
        return value_of(found["plain"] or found["braced"] or found["resolved"], found["default"] or "")

    return _VARIABLE.sub(replacement, path)


def _value_of(name: str, default: str) -> str:
    value = os.environ.get(name) or default
    if not value:
        raise ValueError(f"{name} to be set in the environment, or $$ for a plain $")
    return value


def _home(path: str) -> str:
    found = os.path.expanduser(path)
    if found.startswith("~"):
        raise ValueError(f"a user of this machine after the ~, or ./{path}")
    return found


def _well_formed(path: str) -> str:
    _substitute(path, lambda name, default: name)
    return path


def one_or_several(value: object) -> object:
    return [value] if isinstance(value, str) else value


PathStr = Annotated[str, AfterValidator(expanded), PlainSerializer(literal)]
NodePath = Annotated[str, AfterValidator(_well_formed)]
Files = Annotated[list[PathStr], BeforeValidator(one_or_several)]


MODELS = ("teacher", "reward.reward_model", "reward.judge")  # sections of roles with a model of their own
# those whose value may be null; the two of data and run.plugins are lists
KEYS = (
    "run.plugins",
    "run.job_file",
    "job.machine",
    "model.path",
    "model.tokenizer",
    "model.init_from",
    "data.train_files",
    "data.val_files",
    "data.sampler.class_path",
    "rollout.multi_turn.function_tool_path",
    "rollout.multi_turn.interaction_path",
    "rollout.multi_turn.environment.path",
    "rollout.trtllm.model_dir",
    *(f"{role}.{key}" for role in MODELS for key in ("init_from", "model.path", "model.tokenizer")),
    "reward.judge.template_path",
    "reward.custom_reward_function.path",
    "trainer.rollouts_from",
    "score.tokens_path",
)


class Input(NamedTuple):
    key: str
    path: str  # of a file or a folder, as the config has it


def inputs(config: Config) -> Iterator[Input]:
    """Every file and folder that the config names, once per mention."""
    for key in KEYS:
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name, None)
        for path in [value] if isinstance(value, str) else value or ():
            if key != "job.machine" or is_machine_file(path):
                yield Input(key, file_of(key, path))


def missing(config: Config) -> list[Input]:
    """Those that are not there."""
    return [given for given in inputs(config) if not os.path.exists(given.path)]


def is_machine_file(machine: str) -> bool:
    """Whether job.machine is a file, and not the name of one in configs/machines."""
    return machine.endswith((".yaml", ".yml"))


def file_of(key: str, path: str) -> str:
    """The file in a key's value: a reward function may follow its file, as in `my_reward.py:compute_score`."""
    head, colon, _ = path.rpartition(":")
    return head if key == "reward.custom_reward_function.path" and colon and head.endswith(".py") else path
