"""`hpcrl from-verl`: a job template from a command of verl, and what became of each of its keys."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from hpcrl.config import yaml_core
from hpcrl.config.problems import keys_of, leaves, sections_in, validated
from hpcrl.config.schema import Config, Section
from hpcrl.config.shell_script import Argument, read_commands
from hpcrl.config.verl_keys import converter_of_namesake, entry_of, named, plain
from hpcrl.config.verl_values import OFF, Converted, Missing, Result, Verl, folder_name, lost_loggers
from hpcrl.config.yaml_core import ConfigError, Node
from hpcrl.runtime import exits
from hpcrl.runtime.exits import DONE, InputError
from hpcrl.sandbox.foreign_files import MOST_CONFIG, ForeignFileError, read_text
from hpcrl.sandbox.new_files import draft_of

READ = "verl.trainer.main_ppo"
VERLS_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer")
RENAMED, TO_DECIDE, NO_EFFECT = "under another name", "to decide, or without counterpart", "without effect here"
WRITTEN = "under the same name"
WIDTH = 110


class Setting(NamedTuple):
    key: str  # as it is written
    value: Any
    place: str


class Source(NamedTuple):
    """A command of verl. notes: lines about what belongs to no key."""

    name: str
    settings: list[Setting]
    is_megatron: bool
    notes: list[str]


class Outcome(NamedTuple):
    """What became of a key: one of the four lists above, and the line about it."""

    key: str
    kind: str
    line: str


@dataclass
class Template:
    tree: dict[str, Any] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    defaults: dict[str, Any] = field(default_factory=dict)  # those of verl that the tree has, too

    def get(self, key: str) -> Any:
        node: Any = self.tree
        for name in key.split("."):
            node = node.get(name) if isinstance(node, dict) else None
        return node

    def put(self, key: str, value: Any) -> None:
        *sections, last = key.split(".")
        node = self.tree
        for name in sections:
            node = node.setdefault(name, {})
        node[last] = value


def main(arguments: list[str]) -> NoReturn:
    parser = exits.ArgumentParser(prog="hpcrl from-verl", description="Write a job template from a command of verl.")
    parser.add_argument("--out", metavar="TEMPLATE.yaml", help="file of the template, in place of the output")
    parser.add_argument(
        "--set", metavar="NAME=VALUE", action="append", default=[], help="value of a shell variable of the script"
    )
    parser.add_argument(
        "words", metavar="FILE.sh | FILE.yaml | key=value", nargs="+", help="keys replace those of FILE"
    )
    parsed = parser.parse_intermixed_args(arguments)
    wrong = next((text for text in parsed.set if not re.match(r"\w+=", text)), None)
    if wrong is not None:
        parser.error(f"found --set {wrong}; expected NAME=VALUE")
    with exits.one_line_for_user_errors():
        source = read_source(parsed.words, dict(text.split("=", 1) for text in parsed.set))
        template = template_of(source)
        text = rendered(source, template)
        if parsed.out:
            write(Path(parsed.out), text)
    if not parsed.out:
        print(text, end="")
    print("\n".join(report(source, template, parsed.out)), file=sys.stderr)
    sys.exit(DONE)


def write(path: Path, text: str) -> None:
    try:
        with draft_of(path) as draft:
            draft.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


# reading


def read_source(words: Sequence[str], given: Mapping[str, str]) -> Source:
    """The settings of a script, a YAML file or a list of overrides. Raises ConfigError or InputError."""
    files = [word for word in words if "=" not in word]
    overrides = [Argument(word, 0) for word in words if "=" in word]
    if len(files) > 1:
        raise InputError(f"found the files {' and '.join(files)}; expected one")
    if not files:
        return of_arguments("the command line", overrides, Path(), [])
    path = Path(files[0])
    if path.suffix in (".yaml", ".yml"):
        arguments = [Argument(f"--config-name={path.name}", 0), Argument(f"--config-path={path.parent}", 0)]
        return of_arguments(str(path), [*arguments, *overrides], Path(), [])
    commands, notes = read_commands(text_of(path), str(path), given)
    training = [command for command in commands if command.module == READ]
    if len(training) != 1:
        others = [f"{path}:{one.line} runs {one.module}" for one in commands if one.module != READ]
        instead = (
            f"{READ} in the lines {', '.join(str(one.line) for one in training)}" if training else "; ".join(others)
        )
        raise InputError(f"found {instead or 'no Python program'} in {path}; expected one command python -m {READ}")
    return of_arguments(f"{path}:{training[0].line}", [*training[0].arguments, *overrides], path.parent, notes)


def text_of(path: Path) -> str:
    try:
        return read_text(path, most=MOST_CONFIG)
    except FileNotFoundError:
        raise InputError(f"no such file: {path}; paths are relative to the current folder") from None
    except ForeignFileError as error:
        raise InputError(f"{path} is {error.found}; expected a script or a YAML file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def of_arguments(name: str, arguments: Sequence[Argument], folder: Path, notes: list[str]) -> Source:
    """Settings of Hydra's command line: later ones replace earlier ones, and those of the config file."""
    options: dict[str, str] = {}
    settings: dict[str, Setting] = {}
    notes, texts, file = list(notes), list(arguments), name.partition(":")[0]
    while texts:
        text, line = texts.pop(0)
        place = f"{file}:{line}" if line else "the command line"
        option, equals, value = text.partition("=")
        if option in ("--config-name", "--config-path", "-cn", "-cp"):
            options[{"-cn": "--config-name", "-cp": "--config-path"}.get(option, option)] = (
                value if equals else texts.pop(0).text
            )
        elif match := re.fullmatch(r"(\+{0,2})([\w@/-]+(?:\.[\w-]+)*)=(.*)", text, re.DOTALL):
            settings[match[2]] = Setting(match[2], hydra_value(match[3], place), place)
        elif text.startswith("~"):
            settings.pop(text[1:].partition("=")[0], None)
            notes.append(f"{place}: {text} takes a key out of verl's config; it is not read")
        else:
            notes.append(f"{place}: {text} is neither key=value nor an option of Hydra that is read")
    config = options.get("--config-name", "ppo_trainer").removesuffix(".yaml")
    if config in VERLS_CONFIGS:
        return Source(name, list(settings.values()), "megatron" in config, notes)
    path = config_file(config, options.get("--config-path", "."), folder)
    bases, own = of_config_file(path, notes)
    merged = {setting.key: setting for setting in own} | settings
    return Source(name, list(merged.values()), any("megatron" in base for base in bases), notes)


def hydra_value(text: str, place: str) -> Any:
    """The value in Hydra's notation, which is YAML's but for mappings without spaces."""
    spaced = re.sub(r"([{,]\s*[\w'\"]+):(?=\S)", r"\1: ", text) if text.startswith(("{", "[")) else text
    try:
        return yaml_core.parse(spaced, place, numbered=False).plain() if text else ""
    except ConfigError:
        return text


def config_file(name: str, folder: str, script: Path) -> Path:
    """A config of the user's own: --config-path is relative to the current folder, or to one that holds the script."""
    places = [Path(folder), *(parent / folder for parent in (script, *script.parents))]
    path = next((place / f"{name}.yaml" for place in places if (place / f"{name}.yaml").is_file()), None)
    if path is None:
        raise InputError(
            f"no such config file: {places[0] / name}.yaml; run from-verl in the folder in which the script is run"
        )
    return path


def of_config_file(path: Path, notes: list[str]) -> tuple[list[str], list[Setting]]:
    """Names of verl's configs that a file of Hydra builds on, and its own keys."""
    tree = yaml_core.parse(text_of(path), str(path))
    if not isinstance(tree.value, dict):
        raise InputError(f"{path} is no mapping; expected a config of verl")
    bases: list[str] = []
    settings: dict[str, Setting] = {}
    defaults = tree.value.pop("defaults", None)
    tree.value.pop("hydra", None)
    for base in (defaults.plain() if defaults is not None else None) or []:
        if base in VERLS_CONFIGS:
            bases.append(base)
        elif isinstance(base, str) and base != "_self_" and path.with_name(f"{base}.yaml").is_file():
            others, inherited = of_config_file(path.with_name(f"{base}.yaml"), notes)
            bases += others
            settings |= {setting.key: setting for setting in inherited}
        elif base != "_self_":
            notes.append(f"{path}: the entry {base} of defaults is not read")
    for key, node in leaves((), tree):
        settings[".".join(key)] = Setting(".".join(key), node.plain(), node.place)
    return bases, list(settings.values())


# converting


def template_of(source: Source) -> Template:
    """Every setting is written, renamed, or has a line that says why it is not."""
    known = {".".join(key) for key in keys_of(Config)}
    settings = list(flattened(source.settings, known))
    verl = Verl({plain(setting.key): setting.value for setting in settings}, source.is_megatron)
    template = Template(notes=list(source.notes))
    for setting in sorted(settings, key=lambda setting: plain(setting.key) not in known):
        template.outcomes.append(outcome(setting, verl, template, known))
    for key, value in additions(verl, template, source).items():
        template.put(key, value)
        template.defaults[key] = value
    template.notes += checks(verl, template)
    return template


def flattened(settings: Sequence[Setting], known: set[str]) -> Iterator[Setting]:
    """Settings whose value is a mapping as one for each key inside, unless the mapping is a value here."""
    for setting in settings:
        inside = plain(setting.key)
        is_section = any(key.startswith(f"{inside}.") for key in known) or inside not in known
        if isinstance(setting.value, dict) and setting.value and is_section:
            inner = [Setting(f"{setting.key}.{name}", value, setting.place) for name, value in setting.value.items()]
            yield from flattened(inner, known)
        else:
            yield setting


def outcome(setting: Setting, verl: Verl, template: Template, known: set[str]) -> Outcome:
    """Put the setting into the template, or say why not."""
    key, text = plain(setting.key), f"{setting.key}={shown(setting.value)}"
    at = setting.place.rpartition("/")[2]

    def because(kind: str, reason: str) -> Outcome:
        return Outcome(setting.key, kind, f"{text} ({at}): {reason}")

    if unused := unused_role(key, verl):
        return because(NO_EFFECT, unused)
    if isinstance(setting.value, str) and "${" in setting.value:
        return because(TO_DECIDE, "its value is Hydra's reference to another key; write the value")
    try:
        result = converted(key, setting.value, verl, known)
    except (TypeError, ValueError):  # of a unit's arithmetic
        result = Missing("verl has no such value there, or in a key that this one is counted in; write a number")
    if isinstance(result, str):
        return because(TO_DECIDE if isinstance(result, Missing) else NO_EFFECT, result)
    for own, value in result.items():
        before = template.get(own)
        if before is not None and before != value:
            return because(TO_DECIDE, f"{own} is {shown(before)} already, for all that it holds for")
        if problem := wrong(own, value):
            return because(TO_DECIDE, problem)
    for own, value in result.items():
        template.put(own, value)
    if key == "trainer.logger" and (lost := lost_loggers(setting.value)):
        return because(RENAMED, f"-> {shown(result)}, without {', '.join(lost)}, which is not supported")
    if result == {key: setting.value}:
        return because(WRITTEN, "")
    return because(RENAMED, "-> " + ", ".join(f"{own}: {shown(value)}" for own, value in result.items()))


def converted(key: str, value: Any, verl: Verl, known: set[str]) -> Result:
    """Keys and values of this program for one of verl's, without its prefix."""
    convert = converter_of_namesake(key)
    if convert is not None:
        return convert(value, verl, key)
    if key in known or any(
        key.startswith(f"{free}.") for free in ("data.apply_chat_template_kwargs", "model.hf_config")
    ):
        return "null: the default" if value is None else {key: value}
    verl_key, entry = entry_of(key)
    if verl_key is None or entry is None:
        return Missing("no key of verl that this version has words for") if value not in OFF else "it is off"
    if isinstance(entry, Converted):
        return entry.convert(value, verl, key)
    words = named(verl_key, key, entry)
    if value is None:
        return "null"
    if (renamed := re.fullmatch(r"use ([\w.]+)", words)) and renamed[1] in known:
        return {renamed[1]: value}
    if isinstance(entry, Missing) or words.startswith("use "):
        return words if value in OFF or value in ([], {}) else Missing(words)
    return words


def unused_role(key: str, verl: Verl) -> str:
    """Why nothing under the key is read, if its role is not part of the job."""
    role, estimator = key.split(".")[0], verl.get("algorithm.adv_estimator")
    if role == "critic" and estimator != "gae":
        return f"algorithm.adv_estimator={estimator} has no critic"
    has_reference = verl.get("actor.use_kl_loss") or verl.get("algorithm.use_kl_in_reward")
    return "" if role != "ref" or has_reference else "without a KL term there is no reference policy"


def wrong(key: str, value: Any) -> str:
    """What is wrong with the value of a key here; empty if nothing is."""
    node = Node.of(value)
    for name in reversed(key.split(".")):
        node = Node({name: node}, "")
    try:
        validated(node, Config)
    except ConfigError as error:
        return "; ".join(error.lines)
    return ""


def additions(verl: Verl, template: Template, source: Source) -> dict[str, Any]:
    """What verl has by default and this program has not, where that changes the training or its memory."""
    roles = [role for role in ("actor", "critic", "ref") if not unused_role(role, verl)]
    added: dict[str, Any] = {
        "run.name": folder_name(Path(source.name.partition(":")[0]).stem),
        "model.path": "~/models/deepseek-llm-7b-chat",
        "model.dtype": "bfloat16",
        "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
        "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
        "actor.shuffle": False,
        "job.nodes": verl.get("trainer.nnodes"),
        "job.ntasks_per_node": verl.get("trainer.n_gpus_per_node"),
        "job.gpus_per_node": verl.get("trainer.n_gpus_per_node"),
    }
    if not verl.is_megatron and "model.enable_gradient_checkpointing" not in verl.values:
        added["model.recompute.granularity"] = "full"
    for role in roles:
        for axis in ("tp", "pp", "vpp", "cp", "ep", "etp") if role == "ref" else ():
            added[f"placement.ref.{axis}"] = template.get(f"placement.actor.{axis}") or 1
        if (
            verl.parallel(role, "ep") > 1
            and template.get(f"placement.{role}.etp") is None
            and (role != "ref" or template.get("placement.actor.etp") is None)
        ):
            added[f"placement.{role}.etp"] = verl.parallel(role, "tp")  # Megatron's default
        if verl.is_dynamic(role) and (cp := verl.parallel(role, "cp")) > 1 and role != "ref":
            key = f"{role}.ppo_max_token_len_per_gpu"
            added[key] = verl.get(key) * cp
    one = {key for key, value in added.items() if key.startswith("placement.") and value == 1}
    return {
        key: value
        for key, value in added.items()
        if template.get(key) is None and key not in one and not wrong(key, value)
    }


def checks(verl: Verl, template: Template) -> Iterator[str]:
    """What the user has to see to before the template can run."""
    path = template.get("model.path")
    if isinstance(path, str) and not Path(path).expanduser().is_dir():
        yield f"model.path: {path} is no folder here; it has to be a Hugging Face directory, downloaded before the job"
    if not verl.is_megatron and template.get("placement.actor.tp") is None:
        yield (
            "FSDP divided the weights over all GPUs; here placement.<role>.tp and pp do, and the optimizer's state is "
            "divided over the rest: `hpcrl plan` says whether the job fits, and names the cheapest change if not"
        )


# writing


def rendered(source: Source, template: Template) -> str:
    """The template as YAML, in the order of the schema."""
    head = f"# From {source.name} by `hpcrl from-verl`; names are those of docs/reference/config.md.\n"
    tree = ordered(template.tree, Config)
    return head + "".join(lines_of(name, value, "") for name, value in tree.items())


def ordered(tree: dict[str, Any], section: type[Section]) -> dict[str, Any]:
    result = {}
    for name in sorted(tree, key=lambda name: [*section.model_fields, name].index(name)):
        known = section.model_fields.get(name)
        inner = sections_in(known.annotation) if known is not None else []
        is_section = inner and isinstance(tree[name], dict)
        result[name] = ordered(tree[name], inner[0]) if is_section else tree[name]
    return result


def lines_of(name: str, value: Any, indent: str) -> str:
    """A key on one line if it fits and holds no mappings of mappings."""
    line = f"{indent}{name}: {yaml_core.dump_flow(value)}\n"
    if not isinstance(value, dict) or indent and len(line) <= WIDTH:
        return line
    if len(line) <= WIDTH and not any(isinstance(inner, dict) for inner in value.values()):
        return line
    return f"{indent}{name}:\n" + "".join(lines_of(inner, each, indent + "  ") for inner, each in value.items())


def report(source: Source, template: Template, out: str | None) -> Iterator[str]:
    """What became of the keys: a list for each kind."""
    by_kind = {kind: [one for one in template.outcomes if one.kind == kind] for kind in (RENAMED, TO_DECIDE, NO_EFFECT)}
    same = len(template.outcomes) - sum(map(len, by_kind.values()))
    counts = "".join(f", {len(ones)} {kind}" for kind, ones in by_kind.items())
    yield f"from-verl: {source.name}: {len(template.outcomes)} keys: {same} {WRITTEN}{counts}"
    for kind, ones in by_kind.items():
        yield from [f"{kind}:"] * bool(ones)
        for one in ones:
            yield f"  {one.line}"
    if template.defaults:
        yield "from verl's defaults:"
        yield from (f"  {key}: {shown(value)}" for key, value in template.defaults.items())
    yield from ["before it runs:"] * bool(template.notes)
    yield from (f"  {note}" for note in template.notes)
    yield f"next: hpcrl plan {out or 'TEMPLATE.yaml'}"


def shown(value: Any) -> str:
    text = yaml_core.dump_flow(value)
    return text if len(text) <= 80 else text[:77] + "..."
