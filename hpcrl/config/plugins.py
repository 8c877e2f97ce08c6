"""Plugins, the files of run.plugins: their import, and the parameters of the algorithms that a config names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from hpcrl.algorithms.advantages import ESTIMATORS
from hpcrl.algorithms.distillation import DISTILLATION_LOSSES
from hpcrl.algorithms.optimizers.optimizer import OPTIMIZERS
from hpcrl.algorithms.parameters import Registry, UnknownName, inherited
from hpcrl.algorithms.policy_losses import POLICY_LOSSES
from hpcrl.config.engines import ENGINES
from hpcrl.config.problems import KeyPath, hint, validated
from hpcrl.config.schema import Config, OptimConfig, SamplerConfig, Section
from hpcrl.config.yaml_core import ConfigError, Node
from hpcrl.rewards.manager import REWARD_MANAGERS
from hpcrl.runtime.user_code import import_named


class Family(NamedTuple):
    """Algorithms, or engines, of one kind."""

    registry: Registry[Any]
    sections: tuple[str, ...]  # with the parameters of the built-in ones


FAMILIES = {  # the section with the parameters of plugins, each under its name -> family
    "actor.optim": Family(OPTIMIZERS, ("actor.optim",)),  # and all other sections of this class
    "actor.policy_loss": Family(POLICY_LOSSES, ("actor", "actor.policy_loss", "algorithm.rollout_correction")),
    "algorithm": Family(ESTIMATORS, ("algorithm",)),
    "distillation.distillation_loss": Family(DISTILLATION_LOSSES, ("distillation.distillation_loss",)),
    "reward": Family(REWARD_MANAGERS, ("reward.reward_kwargs",)),
    "rollout": Family(ENGINES, ()),
}


def check_algorithms(config: Config, chosen: Mapping[str, str]) -> dict[str, Any]:
    """Load run.plugins, check all parameters, and return the registered entries of the algorithms `chosen`.

    An entry is missing if its plugin needs torch, which is not installed here.

    Args:
        chosen: key of FAMILIES -> name.
    """
    is_complete = load_plugins(config)
    entries = {}
    for path, name in chosen.items():
        if is_complete or name in FAMILIES[path].registry.names():
            parameters(config, path, name)
            entries[path] = FAMILIES[path].registry.get(name)
    return entries


def load_plugins(config: Config) -> bool:
    """Import the files of run.plugins, and check the parameters that the config has for what they register.

    Returns False, with a warning, if torch is not installed and a file needs it: the parameters for that file remain
    unchecked. Raises InputError or ConfigError for any other failure.
    """
    for family in FAMILIES.values():
        family.registry.entries()  # built-in names are taken first
    modules = [import_named("run.plugins", path) for path in config.run.plugins]
    is_complete = None not in modules
    wrong: list[str] = []
    optimizers = dict(optimizer_sections(config))
    for path, family in {**FAMILIES, **dict.fromkeys(optimizers, FAMILIES["actor.optim"])}.items():
        entries = family.registry.entries().items()
        of_plugins = {name: entry.params for name, entry in entries if not _is_built_in(entry)}
        wrong += _wrong_mappings(attrgetter(path)(config), path, of_plugins, is_complete)
    sampler = config.data.sampler
    if sampler.__pydantic_extra__:
        module = import_named("data.sampler.class_path", sampler.class_path) if sampler.class_path else None
        declaration = getattr(getattr(module, sampler.class_name or "", None), "Parameters", None)
        declared = {sampler.class_name or "": declaration} if declaration is not None else {}
        wrong += _wrong_mappings(sampler, "data.sampler", declared, not sampler.class_path or module is not None)
    if wrong:
        raise ConfigError(*wrong)
    for path, optim in optimizers.items():
        if is_complete or optim.optimizer in OPTIMIZERS.names():
            _check_optimizer(path, optim)
    return is_complete


def _is_built_in(entry: Any) -> bool:
    """Whether a registered entry is the package's own: a class or function with its declaration, or an engine."""
    return getattr(entry, "function", type(entry)).__module__.startswith("hpcrl.")


def optimizer_sections(section: Section, prefix: str = "") -> Iterator[tuple[str, OptimConfig]]:
    """Yield the dotted paths of a config's sections of optimizers, and the sections."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, OptimConfig):
            yield f"{prefix}{name}", value
        elif isinstance(value, Section):
            yield from optimizer_sections(value, f"{prefix}{name}.")


def _check_optimizer(path: str, optim: OptimConfig) -> None:
    """Raise ConfigError or UnknownName, one line, for an optimizer that is unknown or has wrong parameters."""
    try:
        optim.chosen()
    except UnknownName as error:
        raise UnknownName(f"{path}: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _wrong_mappings(section: Section, path: str, declared: Mapping[str, type], is_complete: bool) -> Iterator[str]:
    """Lines about the mappings of an open section.

    Args:
        is_complete: whether all that may have a mapping is in `declared`.
    """
    for name, given in (section.__pydantic_extra__ or {}).items():
        keys = (*path.split("."), name)
        if name in declared:
            try:
                given_parameters(keys, declared[name], given)
            except ConfigError as error:
                yield from error.lines
        elif is_complete:
            names = [*type(section).model_fields, *declared]
            yield f"unknown key {'.'.join(keys)}; {hint(keys, names)}"


def parameters(config: Config, path: str, name: str) -> Any:
    """The parameters of an algorithm: an instance of the dataclass that it declares.

    `path` is a key of FAMILIES. Raises ConfigError for values that the dataclass rejects.
    """
    family = FAMILIES[path]
    declaration = family.registry.get(name).params
    values = inherited(declaration, *(attrgetter(section)(config) for section in family.sections))
    own = (attrgetter(path)(config).__pydantic_extra__ or {}).get(name, {})
    values |= given_parameters((*path.split("."), name), declaration, own)
    try:
        return declaration(**values)
    except UnknownName:
        raise  # its line says what is unknown
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def sampler_parameters(sampler: SamplerConfig, declaration: type) -> Any:
    """The parameters of the user's sampler that the config names: an instance of its `Parameters`."""
    name = sampler.class_name or ""
    given = (sampler.__pydantic_extra__ or {}).get(name, {})
    return declaration(**given_parameters(("data", "sampler", name), declaration, given))


def given_parameters(prefix: KeyPath, declaration: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values under the key `prefix`, checked against a declaration."""
    found = validated(Node.of(dict(given)), section_of(declaration), prefix)
    return {key: getattr(found, key) for key in found.model_fields_set}


@cache
def section_of(declaration: type) -> type[Section]:
    """A parameter dataclass as a section of the schema."""
    return type(declaration.__name__, (Section, declaration), {"__module__": declaration.__module__})
