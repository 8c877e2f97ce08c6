"""From YAML files and `key=value` overrides to a `Config`, and back to YAML."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpcrl.config import yaml_core
from hpcrl.config.schema import Config, Section
from hpcrl.config.yaml_core import ConfigError, Node

KeyPath = tuple[str, ...]


def load_config(path: str | Path | None, overrides: Sequence[str] = (), schema: type[Config] = Config) -> Config:
    """The config of a YAML file (None: the defaults), of the files that it extends, and of overrides such as
    `actor.optim.lr=2e-6`. schema: its class.

    Later wins: extended file, file, overrides from left to right. Mappings are merged, all else is replaced.
    Raises ConfigError with one line that says where, what was found and what was expected.
    """
    tree = _tree(path, overrides)
    try:
        config = schema.model_validate(tree.plain())
    except ValidationError as error:
        raise ConfigError(explain(error, tree, schema)) from None
    for keys in extra_keys(config):
        if config.run.plugins or (keys[:2] == ("data", "sampler") and config.data.sampler.class_path):
            continue  # checked once the file is loaded
        place = _locate(tree, keys)[1].place
        raise ConfigError(f"{place}: unknown key {_dotted(keys)}; {suggest(keys, list(keys_of(schema)))}")
    return config


def raw_value(path: str | Path, overrides: Sequence[str], key: KeyPath) -> Any:
    """The value of one key as it is written, not validated; None if it is not there."""
    node = _tree(path, overrides)
    for part in key:
        if not isinstance(node.value, dict) or part not in node.value:
            return None
        node = node.value[part]
    return node.plain()


def dump_config(config: Config) -> str:
    """The resolved config as YAML; `load_config` of it gives an equal Config."""
    return yaml_core.dump(config.model_dump())


def quoted(text: str) -> str:
    """As YAML that reads as this text, whatever it looks like: for the values of overrides."""
    return "'" + text.replace("'", "''") + "'"


def _tree(path: str | Path | None, overrides: Sequence[str]) -> Node:
    tree = _read(Path(path), chain=()) if path is not None else Node({}, "the command line")
    for override in overrides:
        tree = _merge(tree, _parse_override(override))
    return tree


def _read(path: Path, chain: tuple[Path, ...]) -> Node:
    """The tree of a file merged over the files it extends; `chain` holds the files that led here."""
    by = f"{chain[-1]} extends {path}: " if chain else ""
    if path.resolve() in {earlier.resolve() for earlier in chain}:
        raise ConfigError(f"{' extends '.join(str(p) for p in (*chain, path))}: a circle; remove one of the extends")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{by}no such config file: {path}{_similar_file(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{by}{path} is a directory; expected a YAML file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{by}{path}: not YAML: it is not UTF-8 text") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{by}cannot read {path}: {getattr(error, 'strerror', None) or error}") from None

    tree = yaml_core.parse(text, str(path))
    if tree.value is None:
        return Node({}, str(path))
    if not isinstance(tree.value, dict):
        raise ConfigError(f"{path}: found {_describe(tree)} at the top; expected sections such as 'actor:'")
    base = tree.value.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base.value, str) or not base.value:
        raise ConfigError(f"{base.place}: extends is {_describe(base)}; expected the path of a YAML file")
    return _merge(_read(path.parent / base.value, (*chain, path)), tree)


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
    source = f"override {text}"
    node = yaml_core.parse(value, source, numbered=False)
    for part in reversed(parts):
        node = Node({part: node}, source)
    return node


def _merge(base: Node, over: Node) -> Node:
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(base.value)
    for key, child in over.value.items():
        merged[key] = _merge(merged[key], child) if key in merged else child
    return Node(merged, over.place)


def explain(error: ValidationError, tree: Node, schema: type[Section] = Config, prefix: KeyPath = ()) -> str:
    """One line for the first error; unknown keys first, because a misspelt key is often why another is wrong.

    `tree` is what was validated by `schema`, and is found under the key `prefix` of the config.
    """
    known = list(dict.fromkeys([*keys_of(), *keys_of(schema, prefix)]))
    errors = error.errors(include_url=False)
    unknown = [item for item in errors if item["type"] == "extra_forbidden" or _is_extra(tree, item, known)]
    first = (unknown or errors)[0]
    path, node = _locate(tree, first["loc"])
    place = f"{node.place}: " if node.place else ""
    if unknown:
        return f"{place}unknown key {_dotted(prefix + path)}; {suggest(prefix + path, known)}"
    # members of a union fail one by one, each with its own expectation of the same value
    wanted = [_expected(item) for item in errors if _locate(tree, item["loc"])[0] == path]
    found = f"{_dotted(prefix + path)} is {_describe(node)}"
    return f"{place}{found}; expected {' or '.join(dict.fromkeys(wanted))}"


def _is_extra(tree: Node, item: Any, known: Sequence[KeyPath]) -> bool:
    """Whether the error is of an unknown key in an open section, where only mappings are expected."""
    return item["type"] == "dict_type" and _locate(tree, item["loc"])[0] not in known


def extra_keys(section: Section, prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """The keys of a config that are not in the schema: names of plugins in open sections."""
    yield from ((*prefix, name) for name in section.__pydantic_extra__ or ())
    for name in type(section).model_fields:
        inner = getattr(section, name)
        if isinstance(inner, Section):
            yield from extra_keys(inner, (*prefix, name))


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


def _dotted(path: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _describe(node: Node) -> str:
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
    if item["type"] == "literal_error":
        return str(item["ctx"]["expected"]).replace("'", "")
    return EXPECTED[item["type"]].format(**item.get("ctx", {})) if item["type"] in EXPECTED else str(item["msg"])


def keys_of(section: type[Section] = Config, prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Every key of the schema, sections included; a list of sections has the keys of its entries."""
    for name, field in section.model_fields.items():
        yield (*prefix, name)
        for inner in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, Section):
                yield from keys_of(inner, (*prefix, name))


MICRO_BATCHES = "micro-batches are counted in tokens per model replica: "
LAYOUTS = "layouts are placement.<role>.{tp,pp}, on the ranks of a pool"
OF_VERL = {  # keys of verl that have no namesake here -> what to write
    "_target_": "such lines are Hydra's; leave them out",
    "ppo_micro_batch_size": MICRO_BATCHES + "ppo_max_token_len_per_gpu",
    "ppo_micro_batch_size_per_gpu": MICRO_BATCHES + "ppo_max_token_len_per_gpu",
    "log_prob_micro_batch_size": MICRO_BATCHES + "ref.log_prob_max_token_len_per_gpu",
    "log_prob_micro_batch_size_per_gpu": MICRO_BATCHES + "ref.log_prob_max_token_len_per_gpu",
    "use_dynamic_bsz": "micro-batches are always packed by tokens; leave it out",
    "strategy": "training is always megatron-core's; leave it out",
    "tensor_model_parallel_size": LAYOUTS,
    "pipeline_model_parallel_size": LAYOUTS,
    "n_gpus_per_node": "the ranks are those that srun or mpiexec starts; job.ntasks_per_node is for batch templates",
    "nnodes": "the ranks are those that srun or mpiexec starts; job.nodes is for batch templates",
    "default_local_dir": "a run's files go to <run.dir>/<run.name>/",
    "tool_config_path": "tools are Python functions in one file: rollout.multi_turn.function_tool_path",
    "interaction_config_path": "a user is a class in a Python file: rollout.multi_turn.interaction_path",
    "trainer_mode": "use async_training.mode: sync, one_step_off or bounded_staleness",
    "require_batches": "a step takes data.train_batch_size prompts as soon as they are there; leave it out",
    "trigger_parameter_sync_step": "weights go to the engine after every step; leave it out",
    "max_off_policy_threshold": "use async_training.staleness_threshold",
    "calculate_log_probs": "log-probs of sampled tokens are always kept; leave it out",
    "max_model_len": "it is data.max_prompt_length + data.max_response_length",
    "load_format": "the engine's weights come from the actor; leave it out",
    "global_profiler": "list the steps in trainer.profile_steps",
    "return_multi_modal_inputs": "the roles that need pictures always get them; leave it out",
    "freeze_vision_tower": "use model.vision.train: none, merger, tower or all",
}


def suggest(path: tuple[int | str, ...], known: Sequence[KeyPath]) -> str:
    """What to write instead of an unknown key: the same key of another section, or the nearest one of this."""
    keys = [part for part in path if isinstance(part, str)]
    if keys[0] == "actor_rollout_ref":
        return "names are verl's without the prefix 'actor_rollout_ref.'"
    if keys[-1] in OF_VERL:
        return OF_VERL[keys[-1]]

    def closest(candidates: list[KeyPath]) -> str:
        shared = [len(set(candidate[:-1]) & set(keys[:-1])) for candidate in candidates]
        return ".".join(candidates[shared.index(max(shared))])

    elsewhere = [candidate for candidate in known if candidate[-1] == keys[-1]]
    if elsewhere:
        return f"did you mean {closest(elsewhere)}?"
    here = [candidate[-1] for candidate in known if list(candidate[:-1]) == keys[:-1]]
    nearest = difflib.get_close_matches(keys[-1], here, n=1)
    if nearest:
        return f"did you mean {'.'.join((*keys[:-1], nearest[0]))}?"
    nearest = difflib.get_close_matches(keys[-1], [candidate[-1] for candidate in known], n=1)
    if nearest:
        return f"did you mean {closest([candidate for candidate in known if candidate[-1] == nearest[0]])}?"
    return f"known here: {', '.join(here)}"
