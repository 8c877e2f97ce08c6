"""What is wrong in a config: a line for each unknown key and for each value of the wrong type."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from hpcrl.config.schema import Config, OpenSection, Section
from hpcrl.config.verl_keys import counterpart, plain
from hpcrl.config.yaml_core import OVERRIDE, ConfigError, Node

KeyPath = tuple[str, ...]
S = TypeVar("S", bound=Section)
CLOSE = 0.8  # of difflib's ratio: of names that differ by a letter or two


def validated(tree: Node, schema: type[S], prefix: KeyPath = ()) -> S:
    """The tree as `schema`, which describes what stands under the key `prefix` of a config.

    Raises ConfigError with a line for each problem, in the order of their places. Mappings of plugins are left to
    `hpcrl.config.plugins`, which loads them.
    """
    wrong: ValidationError | None = None
    try:
        section = schema.model_validate(tree.plain())
    except ValidationError as error:
        wrong = error
    unknown = [key for key in unknown_keys(tree, schema) if not _may_be_a_plugins(tree, key)]
    lines = [line for key in unknown for line in _lines_of(tree, key, schema, prefix)]
    if wrong is not None:
        lines += _wrong_values(tree, wrong, {key.path for key in unknown}, prefix)
    if lines:
        raise ConfigError(*dict.fromkeys(map(str, sorted(lines, key=Line.order))))
    return section


class Line(NamedTuple):
    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}" if self.place else self.text

    def order(self) -> tuple[bool, str, int]:
        """Files before overrides, and each from its first line."""
        source, _, number = self.place.rpartition(":")
        is_override = self.place.startswith(OVERRIDE)
        return (True, "", 0) if is_override or not number.isdigit() else (False, source, int(number))


class UnknownKey(NamedTuple):
    path: KeyPath
    node: Node
    section: type[Section]  # that does not have it


def unknown_keys(tree: Node, section: type[Section], prefix: KeyPath = ()) -> Iterator[UnknownKey]:
    """The keys of a tree that are not in the schema, each at its first unknown name."""
    if not isinstance(tree.value, dict):
        return
    for name, node in tree.value.items():
        field = section.model_fields.get(name)
        if field is None:
            yield UnknownKey((*prefix, name), node, section)
            continue
        values = node.value if isinstance(node.value, list) else [node]
        if typing.get_origin(field.annotation) is dict and isinstance(node.value, dict):
            values = list(node.value.values())
        for inner in sections_in(field.annotation):
            for value in values:
                yield from unknown_keys(value, inner, (*prefix, name))


def keys_of(section: type[Section] = Config, prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Every key of the schema, sections included; a list of sections has the keys of its entries."""
    for name, field in section.model_fields.items():
        yield (*prefix, name)
        for inner in sections_in(field.annotation):
            yield from keys_of(inner, (*prefix, name))


def sections_in(annotation: Any) -> list[type[Section]]:
    """The sections among a type and its arguments."""
    kinds = [kind for kind in (annotation, *typing.get_args(annotation)) if not isinstance(kind, types.GenericAlias)]
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]


def _may_be_a_plugins(tree: Node, key: UnknownKey) -> bool:
    """Whether it is a mapping in an open section, and the config names files that are not loaded yet."""
    if not (issubclass(key.section, OpenSection) and isinstance(key.node.value, dict)):
        return False
    files = [find(tree, ("run", "plugins"))]
    if key.path[:2] == ("data", "sampler"):
        files.append(find(tree, ("data", "sampler", "class_path")))
    return any(node is not None and bool(node.value) for node in files)


def find(node: Node, key: KeyPath) -> Node | None:
    for part in key:
        if not isinstance(node.value, dict) or part not in node.value:
            return None
        node = node.value[part]
    return node


def _lines_of(tree: Node, key: UnknownKey, schema: type[Section], prefix: KeyPath) -> Iterator[Line]:
    """Those about an unknown key. Sections of verl hold keys whose counterparts are in several places."""
    for path, leaf in leaves(key.path, key.node):
        shown, words = _advice(tree, path, key, schema, prefix)
        node = find(tree, shown)
        # merged from several overrides, a mapping has the place of the last one
        place = node.place if node is not None and not node.place.startswith(OVERRIDE) else leaf.place
        yield Line(place, f"unknown key {dotted((*prefix, *shown))}; {words}")


def leaves(path: KeyPath, node: Node) -> Iterator[tuple[KeyPath, Node]]:
    """Each value below a node that is not a mapping with keys, and its key below `path`."""
    if isinstance(node.value, dict) and node.value:
        for name, inner in node.value.items():
            yield from leaves((*path, name), inner)
    else:
        yield path, node


def _advice(tree: Node, path: KeyPath, key: UnknownKey, schema: type[Section], prefix: KeyPath) -> tuple[KeyPath, str]:
    """What to write instead of the key `path`, which is unknown from `key` on; and the key or section that this is
    about."""
    text, front = dotted((*prefix, *path)), 0
    if plain(text) != text:  # verl has it elsewhere
        names = plain(text).split(".")
        front = len(path) - len(names)
        inside = Node(None, "")
        for name in reversed(names):
            inside = Node({name: inside}, "")
        unknown = next(unknown_keys(inside, schema), None)
        if unknown is None or _may_be_a_plugins(tree, unknown):
            return path, f"use {plain(text)}"
        key = unknown
    match = counterpart(text)
    if match is not None:
        return path[: match.names - len(prefix)], match.words
    return path[: front + len(key.path)], nearest((*prefix, *key.path), key.section.model_fields)


def hint(path: KeyPath, names: Collection[str]) -> str:
    """What to write instead of an unknown key, whose section has `names`."""
    found = counterpart(dotted(path))
    return found.words if found is not None else nearest(path, names)


def nearest(path: KeyPath, names: Collection[str]) -> str:
    """The name that is meant, if it begins as the last one of `path` and is spelled almost like it; else all names."""
    alike = [name for name in names if name[:1] == path[-1][:1]]
    found = difflib.get_close_matches(path[-1], alike, n=1, cutoff=CLOSE)
    return f"did you mean {dotted((*path[:-1], found[0]))}?" if found else f"known here: {', '.join(names)}"


def _wrong_values(tree: Node, error: ValidationError, unknown: Collection[KeyPath], prefix: KeyPath) -> Iterator[Line]:
    """A line for each value that is wrong: members of a union fail one by one, each with an expectation of its own."""
    expected: dict[tuple[int | str, ...], list[str]] = {}
    nodes = {}
    for item in error.errors(include_url=False):
        path, node = _locate(tree, item["loc"])
        if tuple(part for part in path if isinstance(part, str)) in unknown:
            continue
        expected.setdefault(path, []).append(_expected(item))
        nodes[path] = node
    for path, expectations in expected.items():
        value = f"{dotted((*prefix, *path))} is {describe(nodes[path])}"
        yield Line(nodes[path].place, f"{value}; expected {' or '.join(dict.fromkeys(expectations))}")


def _locate(tree: Node, loc: tuple[int | str, ...]) -> tuple[tuple[int | str, ...], Node]:
    """Follow pydantic's location down the tree, leaving out what stands only there (names of union members)."""
    path: tuple[int | str, ...] = ()
    for part in loc:
        inside = tree.value
        if isinstance(inside, dict) and part in inside:
            tree = inside[str(part)]
        elif isinstance(inside, list) and isinstance(part, int) and part < len(inside):
            tree = inside[part]
        else:
            continue
        path += (part,)
    return path, tree


def dotted(path: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def describe(node: Node) -> str:
    value = node.value
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"the text {text}" if isinstance(value, str) else text


EXPECTED = {  # type of a pydantic error -> what it wanted, in the words of the person who writes YAML
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "too_short": "{min_length} entries",
    "too_long": "{max_length} entries",
    "value_error": "{error}",
}


def _expected(item: Any) -> str:
    if item["type"] == "missing":
        return f"the key {item['loc'][-1]}"
    if item["type"] == "literal_error":
        return str(item["ctx"]["expected"]).replace("'", "")
    return EXPECTED[item["type"]].format(**item.get("ctx", {})) if item["type"] in EXPECTED else str(item["msg"])
