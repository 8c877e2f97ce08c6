"""From YAML files and `key=value` overrides to a `Config`, and back to YAML."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcrl.config import yaml_core
from hpcrl.config.paths import expanded, literal
from hpcrl.config.problems import KeyPath, describe, find, validated
from hpcrl.config.schema import Config
from hpcrl.config.yaml_core import OVERRIDE, ConfigError, Node
from hpcrl.sandbox.foreign_files import MOST_CONFIG, ForeignFileError, read_text


def load_config(path: str | Path | None, overrides: Sequence[str] = (), schema: type[Config] = Config) -> Config:
    """The config of a YAML file (None: the defaults), of the files that it extends, and of overrides such as
    `actor.optim.lr=2e-6`.

    Later wins: extended file, file, overrides from left to right. Mappings are merged, all else is replaced.
    Raises ConfigError with a line for each unknown key and wrong value: where, what was found, what was expected.

    Args:
        schema: class of the config.
    """
    return validated(_tree(path, overrides), schema)


def job_file(path: str | Path, overrides: Sequence[str]) -> str | None:
    """run.job_file: the Python file of the job that a config is for; None for a built-in job."""
    node = find(_tree(path, overrides), ("run", "job_file"))
    if node is None or not isinstance(node.value, str):
        return None
    return _expanded("run.job_file", node)


def raw_value(path: str | Path, overrides: Sequence[str], key: KeyPath) -> Any:
    """The value of one key as it is written, not validated; None if it is not there."""
    node = find(_tree(path, overrides), key)
    return None if node is None else node.plain()


def dump_config(config: Config) -> str:
    """The resolved config as YAML; `load_config` of it gives an equal Config."""
    return yaml_core.dump(config.model_dump())


def quoted_path(path: str) -> str:
    """As YAML that reads as this path, whatever it looks like: for the values of overrides."""
    return "'" + literal(path).replace("'", "''") + "'"


def _expanded(key: str, node: Node) -> str:
    """The path that is the value of a key, outside the schema."""
    try:
        return expanded(node.value)
    except ValueError as error:
        raise ConfigError(f"{node.place}: {key} is {describe(node)}; expected {error}") from None


def _tree(path: str | Path | None, overrides: Sequence[str]) -> Node:
    tree = _read(Path(path), chain=()) if path is not None else Node({}, "the command line")
    for override in overrides:
        tree = merge(tree, _parse_override(override))
    return tree


def _read(path: Path, chain: tuple[Path, ...]) -> Node:
    """The tree of a file merged over the files it extends; `chain` holds the files that led here."""
    by = f"{chain[-1]} extends {path}: " if chain else ""
    if path.resolve() in {earlier.resolve() for earlier in chain}:
        raise ConfigError(f"{' extends '.join(str(p) for p in (*chain, path))}: a circle; remove one of the extends")
    try:
        text = read_text(os.path.realpath(path), most=MOST_CONFIG).removeprefix("\ufeff")
    except FileNotFoundError:
        raise ConfigError(f"{by}no such config file: {path}{_similar_file(path)}") from None
    except ForeignFileError as error:
        raise ConfigError(f"{by}{path} is {error.found}; expected a YAML file of at most {MOST_CONFIG} bytes") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{by}{path}: not YAML: it is not UTF-8 text") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{by}cannot read {path}: {getattr(error, 'strerror', None) or error}") from None

    tree = yaml_core.parse(text, str(path))
    if tree.value is None:
        return Node({}, str(path))
    if not isinstance(tree.value, dict):
        raise ConfigError(f"{path}: found {describe(tree)} at the top; expected sections such as 'actor:'")
    base = tree.value.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base.value, str) or not base.value:
        raise ConfigError(f"{base.place}: extends is {describe(base)}; expected the path of a YAML file")
    return merge(_read(path.parent / _expanded("extends", base), (*chain, path)), tree)


def _similar_file(path: Path) -> str:
    try:
        siblings = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    except OSError:
        return ""
    nearest = difflib.get_close_matches(path.name, siblings, n=1)
    return f"; did you mean {path.parent / nearest[0]}?" if nearest else ""


def _parse_override(text: str) -> Node:
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"found the override {text!r}; expected key=value, such as actor.optim.lr=2e-6")
    source = f"{OVERRIDE}{text}"
    node = yaml_core.parse(value, source, numbered=False)
    for part in reversed(parts):
        node = Node({part: node}, source)
    return node


def merge(base: Node, over: Node) -> Node:
    """The tree `over` laid over `base`: mappings are merged, all else is replaced."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(base.value)
    for key, child in over.value.items():
        merged[key] = merge(merged[key], child) if key in merged else child
    return Node(merged, over.place)
