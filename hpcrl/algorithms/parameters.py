"""Algorithms by name, as the YAML names them, and their parameters, which each declares beside its function.

    @dataclass(frozen=True)
    class MyLoss:
        sharpness: float = param(2.0, gt=0, help="exponent of the ratio")

The config schema collects the declarations of what is built in. Keys of a plugin are under a mapping with its name.
"""

from __future__ import annotations

import difflib
import sys
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from importlib import import_module
from numbers import Real
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

Entry = TypeVar("Entry")


class UnknownName(ValueError):
    """A name in the config that is not registered; the command line prints it as one line."""

    user_error = True


class Registry(Generic[Entry]):
    """name -> entry. `kind` names the entries in messages; importing `modules` registers the built-in ones."""

    def __init__(self, kind: str, *modules: str) -> None:
        self.kind = kind
        self._modules = modules
        self._entries: dict[str, Entry] = {}

    def add(self, name: str, entry: Entry) -> None:
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered already; choose another name")
        self._entries[name] = entry

    def get(self, name: str) -> Entry:
        known = self.entries()
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UnknownName(f"unknown {self.kind} {name!r}; {hint}there are {', '.join(self.names())}")
        return known[name]

    def names(self) -> list[str]:
        return sorted(self.entries())

    def entries(self) -> dict[str, Entry]:
        for module in self._modules:
            import_module(module)
        return self._entries


class LazyModule(ModuleType):
    """A module that is imported when one of its attributes is first read.

    The files of algorithms declare parameters, which are read on login nodes without torch; they import `np` and
    `torch` from here.
    """

    def __getattr__(self, name: str) -> Any:
        module = import_module(self.__name__)
        self.__dict__.update({key: value for key, value in vars(module).items() if not key.startswith("__")})
        return getattr(module, name)


if TYPE_CHECKING:
    import numpy as np
    import torch
else:
    np, torch = LazyModule("numpy"), LazyModule("torch")

P = TypeVar("P")
BOUNDS = {  # of numbers -> (words, whether the number is within)
    "gt": ("above", lambda value, bound: value > bound),
    "ge": ("of at least", lambda value, bound: value >= bound),
    "lt": ("below", lambda value, bound: value < bound),
    "le": ("of at most", lambda value, bound: value <= bound),
}
WORDS: dict[Any, str] = {bool: "true or false", int: "a number", float: "a number", str: "text", type(None): "null"}


@dataclass(frozen=True)
class NoParameters:
    """The declaration of what has no parameters."""


def param(default: Any, *, help: str, **bounds: float) -> Any:
    """A field of a parameter dataclass: its default, its description, and bounds of the number: gt, ge, lt, le.

    A default of None means that null is allowed too. A list or a mapping is copied for each instance; bounds of a list
    are those of its numbers, and `length` is the number of them.
    """
    if wrong := set(bounds).difference(BOUNDS, ("length",)):
        raise TypeError(f"param() was given {', '.join(sorted(wrong))}; expected gt, ge, lt or le")
    metadata = {"help": help, "bounds": bounds}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    return field(default=default, metadata=metadata)


class Parameter(NamedTuple):
    """One field of a declaration."""

    name: str
    type: Any
    default: Any  # a factory where the default is a list or a mapping
    has_factory: bool
    help: str
    bounds: Mapping[str, float]


def parameters_of(declaration: type) -> list[Parameter]:
    """The fields of a parameter dataclass. Raises TypeError for a class that declares none in the expected form."""
    params = getattr(declaration, "__dataclass_params__", None)
    if params is None or not params.frozen:
        raise TypeError(f"{declaration!r} declares parameters; expected a class with @dataclass(frozen=True)")
    types_of = typing.get_type_hints(declaration)
    parameters = []
    for one in fields(declaration):
        has_factory = one.default_factory is not MISSING
        default = one.default_factory if has_factory else one.default
        if default is MISSING:
            raise TypeError(f"{declaration.__name__}.{one.name} has no default; expected one, which may be None")
        kind = types_of[one.name] if default is not None else types_of[one.name] | None
        metadata = one.metadata
        parameters.append(
            Parameter(one.name, kind, default, has_factory, metadata.get("help", ""), metadata.get("bounds", {}))
        )
    return parameters


def make(declaration: type[P], values: Mapping[str, Any]) -> P:
    """An instance from plain values; those that it has no field for are left out, and null is the default unless the
    field allows it. Raises TypeError or ValueError for a value of the wrong type or out of bounds."""
    given = {}
    for parameter in parameters_of(declaration):
        if parameter.name not in values:
            continue
        value = values[parameter.name]
        if value is None and type(None) not in typing.get_args(parameter.type):
            continue
        _check(parameter, value)
        given[parameter.name] = value
    return declaration(**given)


def inherited(declaration: type, *sections: Any) -> dict[str, Any]:
    """The values of the fields that `declaration` inherits from the same dataclasses as the config sections."""
    values: dict[str, Any] = {}
    for section in sections:
        for base in declaration.__mro__:
            if is_dataclass(base) and isinstance(section, base):
                values |= {one.name: getattr(section, one.name) for one in fields(base)}
    return values


def _check(parameter: Parameter, value: Any) -> None:
    kinds = members(parameter.type)
    choices = [
        choice for kind in kinds if typing.get_origin(kind) is typing.Literal for choice in typing.get_args(kind)
    ]
    if choices and value in choices:
        return
    if not any(_is_a(kind, value) for kind in kinds):
        expected = [
            *map(str, choices),
            *(WORDS.get(kind, "a list") for kind in kinds if kind in WORDS or _is_list(kind)),
        ]
        error = ValueError if choices else TypeError
        raise error(f"{parameter.name} is {value!r}; expected {' or '.join(dict.fromkeys(expected))}")
    if isinstance(value, list | tuple):
        (kind,) = (typing.get_args(kind)[0] for kind in kinds if _is_list(kind))
        if len(value) != parameter.bounds.get("length", len(value)):
            raise ValueError(f"{parameter.name} has {len(value)} entries; expected {parameter.bounds['length']:.0f}")
        for number, item in enumerate(value):
            _check(parameter._replace(name=f"{parameter.name}[{number}]", type=kind), item)
    for key, bound in parameter.bounds.items() if _is_a(float, value) else ():
        if key == "length":
            continue
        words, is_within = BOUNDS[key]
        if not is_within(value, bound):
            raise ValueError(f"{parameter.name} is {value}; expected a number {words} {bound}")


def _is_a(kind: Any, value: Any) -> bool:
    """Whether a value, which may be numpy's or a tensor of one number, is of a type of YAML values."""
    if kind in (int, float):
        torch = sys.modules.get("torch")
        is_tensor = torch is not None and isinstance(value, torch.Tensor) and value.numel() == 1
        return is_tensor or (isinstance(value, Real) and not isinstance(value, bool))
    if kind is bool:
        return type(value).__name__ in ("bool", "bool_")
    return isinstance(value, list | tuple) if _is_list(kind) else isinstance(kind, type) and isinstance(value, kind)


def _is_list(kind: Any) -> bool:
    return typing.get_origin(kind) is list


def members(kind: Any) -> tuple[Any, ...]:
    """The types of a union; of another type, itself."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


# the sections of a whole config, verl's and ours, which hold nothing for the one that is read
SECTIONS = frozenset(
    """actor actor_rollout_ref algorithm async_training critic custom_reward_function data distillation generate
    global_profiler job model online_dpo placement preference ray_kwargs ref reward reward_model rm rollout run
    sandbox_fusion score sft skip teacher trainer transfer_queue""".split()
)


def flat_config(
    config: Mapping[str, Any] | None, section: str, known: Collection[str], passed_over: Collection[str] = ()
) -> dict[str, Any]:
    """Dotted key -> value of a mapping that may be nested, dotted or both, with or without `section.` in front.

    A config may be a mapping, a dataclass, or have `model_dump` (pydantic); anything else is a TypeError. A subsection
    that is None (`filter_groups: null`) says nothing, so it is left out.

    Args:
        known: every dotted key of the section; another one is an error.
        passed_over: keys and subsections that are known and of no interest; so are `_target_`, and the other sections
            of a whole config, which has this section too.
    """
    plain = _plain({} if config is None else config)
    if not isinstance(plain, Mapping):
        raise TypeError(f"the config is a {type(plain).__name__}; expected a mapping of verl's keys of {section}")
    leaves = dict(_leaves(plain))
    fronts = (f"actor_rollout_ref.{section}.", f"{section}.")
    is_whole = any(dotted.startswith(fronts) for dotted in leaves)
    subsections = {key.rsplit(".", 1)[0] for key in known if "." in key}
    flat: dict[str, Any] = {}
    for dotted, value in leaves.items():
        if is_whole and not dotted.startswith(fronts) and dotted.split(".")[0] in SECTIONS:
            continue
        key = dotted.removeprefix("actor_rollout_ref.").removeprefix(f"{section}.")
        if key.split(".")[-1] == "_target_" or any(f"{key}.".startswith(f"{other}.") for other in passed_over):
            continue
        if key in subsections and value is None:
            continue
        if key not in known:
            near = difflib.get_close_matches(key, [*known, *passed_over], n=1, cutoff=0.7)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
            raise UnknownName(f"unknown key {dotted!r} in {section}; {hint}")
        flat[key] = value
    return flat


def _leaves(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        inner = _plain(value)
        if isinstance(inner, Mapping):
            yield from _leaves(inner, f"{path}{key}.")
        else:
            yield f"{path}{key}", inner


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump()
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
