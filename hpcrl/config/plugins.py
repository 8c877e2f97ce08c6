"""Plugins, the files of run.plugins: their import, and the parameters of the algorithms that a config names."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, NamedTuple

from pydantic import ValidationError

from hpcrl.algorithms.advantages import ESTIMATORS
from hpcrl.algorithms.distillation import DISTILLATION_LOSSES
from hpcrl.algorithms.parameters import inherited
from hpcrl.algorithms.policy_losses import POLICY_LOSSES
from hpcrl.algorithms.registry import Registry, UnknownName
from hpcrl.config.loader import explain, keys_of, suggest
from hpcrl.config.schema import Config, Section
from hpcrl.config.yaml_core import ConfigError, Node
from hpcrl.runtime.user_code import import_file

log = logging.getLogger(__name__)


class Family(NamedTuple):
    """Algorithms of one kind."""

    registry: Registry[Any]
    sections: tuple[str, ...]  # with the parameters of the built-in ones


FAMILIES = {  # the section with the parameters of plugins, each under its name -> family
    "actor.policy_loss": Family(POLICY_LOSSES, ("actor", "actor.policy_loss", "algorithm.rollout_correction")),
    "algorithm": Family(ESTIMATORS, ("algorithm",)),
    "distillation.distillation_loss": Family(DISTILLATION_LOSSES, ("distillation.distillation_loss",)),
}


def load_plugins(config: Config) -> bool:
    """Import the files of run.plugins, and check the parameters that the config has for what they register.

    Returns False if torch is not installed and a file needs it: what that file registers is then unknown and its
    parameters remain unchecked. Raises ConfigError for any other failure.
    """
    is_complete = True
    for family in FAMILIES.values():
        family.registry.entries()  # built-in names are taken first
    for path in config.run.plugins:
        try:
            import_file(path)
        except Exception as error:  # the file is the user's
            if not (isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "torch"):
                raise ConfigError(
                    f"run.plugins: {path} cannot be loaded: {type(error).__name__}: {error}; correct the file"
                ) from None
            log.warning("run.plugins: %s needs torch, which is not installed here: its parameters are unchecked", path)
            is_complete = False
    for path, family in FAMILIES.items():
        declared = plugins_of(family.registry)
        for name, given in (_section(config, path).__pydantic_extra__ or {}).items():
            if name in declared:
                _given(path, name, declared[name], given)
            elif is_complete:
                keys = (*path.split("."), name)
                known = [*keys_of(), *((*path.split("."), plugin) for plugin in declared)]
                raise ConfigError(f"unknown key {'.'.join(keys)}; {suggest(keys, known)}")
    return is_complete


def plugins_of(registry: Registry[Any]) -> dict[str, type]:
    """name -> parameter dataclass of what is registered outside of this package."""
    return {
        name: entry.params
        for name, entry in registry.entries().items()
        if not entry.function.__module__.startswith("hpcrl.")
    }


def parameters(config: Config, path: str, name: str) -> Any:
    """The parameters of an algorithm: an instance of the dataclass that it declares.

    `path` is a key of FAMILIES. Raises ConfigError for values that the dataclass rejects.
    """
    family = FAMILIES[path]
    declaration = family.registry.get(name).params
    values = inherited(declaration, *(_section(config, section) for section in family.sections))
    own = (_section(config, path).__pydantic_extra__ or {}).get(name, {})
    values |= _given(path, name, declaration, own)
    try:
        return declaration(**values)
    except UnknownName:
        raise  # its line says what is unknown
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _section(config: Config, path: str) -> Any:
    section: Any = config
    for name in path.split("."):
        section = getattr(section, name)
    return section


def _given(path: str, name: str, declaration: type, given: dict[str, Any]) -> dict[str, Any]:
    """The values under a plugin's name, checked against its declaration."""
    schema, prefix = section_of(declaration), (*path.split("."), name)
    try:
        found = schema.model_validate(given)
    except ValidationError as error:
        raise ConfigError(explain(error, Node.of(given), schema, prefix)) from None
    return {key: getattr(found, key) for key in found.model_fields_set}


@cache
def section_of(declaration: type) -> type[Section]:
    """A parameter dataclass as a section of the schema."""
    return type(declaration.__name__, (Section, declaration), {"__module__": declaration.__module__})
