"""YAML in and out by the core schema of YAML 1.2: `1e-4` is a number, `no` is text, `00:30:00` is text.

PyYAML follows YAML 1.1, where these are text, False and 1800.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from hpcrl.sandbox.foreign_files import check_yaml


class ConfigError(ValueError):
    """A line for the user, or several: what was found, what was expected, what to do. The program ends with exit code
    2."""

    user_error = True

    def __init__(self, *lines: str):
        super().__init__("\n".join(lines))
        self.lines = lines


OVERRIDE = "override "  # begins the place of a value that an override gives
_TAG = "tag:yaml.org,2002:"
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)"
    r"|\.(?:nan|NaN|NAN))$"
)
# (tag, whole scalar, characters it can start with); the first match wins, so integers stand before floats
_CORE_SCHEMA = (
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("merge", re.compile(r"^<<$"), ["<"]),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}


class _Dumper(yaml.SafeDumper):
    """Keeps PyYAML's 1.1 resolvers and adds 1.2's: text that either reads as something else is quoted."""


for _name, _pattern, _first in _CORE_SCHEMA:
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, _first)
    _Dumper.add_implicit_resolver(_TAG + _name, _pattern, _first)


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, 0) if text.startswith(("0o", "0x")) else int(text)


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor(_TAG + "int", _construct_int)
_Loader.add_constructor(_TAG + "float", _construct_float)


@dataclass(frozen=True)
class Node:
    """A YAML value that remembers where it was written, so that errors can say so."""

    value: Any  # dict[str, Node], list[Node], or a scalar
    place: str

    @classmethod
    def of(cls, value: Any) -> Node:
        """A plain value that was written in no file."""
        if isinstance(value, dict):
            return cls({key: cls.of(child) for key, child in value.items()}, "")
        return cls([cls.of(child) for child in value] if isinstance(value, list) else value, "")

    def plain(self) -> Any:
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value


def parse(text: str, source: str, *, numbered: bool = True) -> Node:
    """The value of one YAML document; `source` names it in errors, with line numbers when `numbered`."""

    def place(mark: yaml.Mark | None) -> str:
        return f"{source}:{mark.line + 1}" if numbered and mark is not None else source

    def convert(node: yaml.Node) -> Node:
        here = place(node.start_mark)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return Node(dict(pairs(node)), here)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return Node([convert(child) for child in node.value], here)
        return Node(loader.construct_object(node, deep=True), here)

    def pairs(node: yaml.MappingNode) -> Iterator[tuple[str, Node]]:
        # before merging: a key may stand both in the mapping and in what `<<` brings
        seen: dict[str, str] = {}
        for key_node, _ in node.value:
            if key_node.tag == _TAG + "merge":
                continue
            key = loader.construct_object(key_node, deep=True)
            where = place(key_node.start_mark)
            if not isinstance(key, str):
                raise ConfigError(f"{where}: found the key {key!r}; keys are text, so quote it")
            if key in seen:
                raise ConfigError(f"{where}: the key {key} stands twice, first at {seen[key]}; keep one of them")
            seen[key] = where
        loader.flatten_mapping(node)
        for key_node, value_node in node.value:
            yield key_node.value, Node(convert(value_node).value, place(key_node.start_mark))

    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return Node(None, source)
        try:
            check_yaml(root)
        except ValueError as error:
            raise ConfigError(f"{source}: {error}") from None
        return convert(root)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{place(error.problem_mark)}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply, or an alias that contains itself") from None


def dump(value: Any) -> str:
    """Plain dicts, lists and scalars as YAML that `parse` reads back to an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=120)


def dump_flow(value: Any) -> str:
    """The same on one line, in YAML's flow notation."""
    return (
        yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=10**6, default_flow_style=True)
        .removesuffix("...\n")
        .strip()
    )
