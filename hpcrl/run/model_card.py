"""The model card of an export, README.md: facts from the records of a run, and their text as the Hugging Face hub reads
it."""

from __future__ import annotations

import math
import pwd
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from hpcrl.config import yaml_core
from hpcrl.engine.checkpoint.store import is_hugging_face
from hpcrl.observe.read.runlog import RunError, read_run
from hpcrl.observe.read.token_text import read_config
from hpcrl.observe.report.tables import number
from hpcrl.run.start import flatten
from hpcrl.sandbox.foreign_files import MOST_CONFIG, printable, read_text
from hpcrl.sandbox.new_files import read_json_or

README = "README.md"
LICENSE = ("license", "license_name", "license_link")
LOSS = (
    *("algorithm.adv_estimator", "actor.policy_loss.loss_mode", "actor.loss_agg_mode", "actor.entropy_coeff"),
    *("actor.kl_loss_coef", "algorithm.kl_ctrl.kl_coef"),
)
SWITCHES = {  # key -> the key without which it has no effect
    "actor.kl_loss_coef": "actor.use_kl_loss",
    "algorithm.kl_ctrl.kl_coef": "algorithm.use_kl_in_reward",
    "model.lora_rank": "model.lora_rank",
}
UPDATE = (
    *("actor.optim.optimizer", "actor.optim.lr", "actor.optim.weight_decay", "data.train_batch_size"),
    *("actor.ppo_mini_batch_size", "actor.ppo_epochs", "rollout.n", "rollout.temperature"),
    "rollout.val_kwargs",
)
OWN = ("loss_type", "beta", "optim.optimizer", "optim.lr", "optim.weight_decay", "batch_size", "eval_samples")
GENERAL = ("model.lora_rank", "model.dtype", "data.max_prompt_length", "data.max_response_length", "run.seed")
HOMES = ("home", "Users", "users")  # folders of users' folders
NAMELESS = ("checkpoints", "huggingface", "snapshots", "/", "..", ".", "~")  # components that do not name a model
PATH = re.compile(r"[^\s,'\"\[\]{}=:]*/[^\s,'\"\[\]{}=:]*")
WHERE = re.compile(r"(?:placement|job|run\.dir)[.=]")  # overrides that say where a run ran

METHODS = {"sigmoid": "dpo"}  # names of losses -> of methods

Point = tuple[int, float]  # step, value


class CardFacts(NamedTuple):
    """What a card says; all names are public ones.

    start: the weights that training began with; None for random ones. base: the same, or the base model of an export.
    license: entries of the model's card. files: name, train or val, and the rows that were read. figures: metric ->
    first and last validation.
    """

    run: str
    job: str
    step: int
    start: str | None
    base: str | None
    license: Mapping[str, str]
    settings: Mapping[str, Any]
    command: Sequence[str]
    files: Sequence[tuple[str, str, str]]
    datasets: Sequence[str]
    figures: Mapping[str, tuple[Point, Point]]
    versions: Mapping[str, str]


def card_facts(run: Path, state: Mapping[str, Any], step: int) -> CardFacts:
    """Read the facts about a run's weights after `step`.

    Args:
        state: contents of the checkpoint's trainer.json.
    """
    config, job, rows = flatten(read_config(run)), str(state.get("job", "train")), flatten(state.get("rows", {}))
    init_from = config.get("model.init_from")
    path = config.get("model.path") or (init_from if init_from and is_hugging_face(Path(init_from)) else None)
    front = {} if path is None else front_matter(Path(path) / README)
    start = init_from or path
    base = None if path is None else public_name(path)
    if "hpcrl" in (front.get("tags") or ()):  # an export itself
        base = str(front["base_model"]) if "base_model" in front else None
    files = [(use, str(file)) for use in ("train", "val") for file in config.get(f"data.{use}_files") or ()]
    return CardFacts(
        run.name,
        job,
        step,
        None if start is None else public_name(start),
        base,
        {key: front[key] for key in LICENSE if isinstance(front.get(key), str)},
        chosen_settings(config, job),
        public_command(map(str, state.get("command", ()))),
        [(public_name(file), use, str(rows.get(f"{use}.{file}", ""))) for use, file in files],
        list(dict.fromkeys(public_name(file) for use, file in files if use == "train" and "datasets--" in file)),
        validation_figures(run, step),
        {name: str(version) for name, version in (state.get("versions", {}) | submitted(run)).items()},
    )


def submitted(run: Path) -> dict[str, str]:
    """The commit of the code that was submitted last, if the run was."""
    commit = read_json_or(run / "bundle" / "origin.json", {}, run).get("commit")
    return {"commit": str(commit)} if commit else {}


def front_matter(card: Path) -> dict[str, Any]:
    """The YAML at the start of a model card, without a licence that is a file beside it; {} if there is none."""
    try:
        found = re.match(r"---\n(.*?)\n---(?:\n|$)", read_text(card, most=MOST_CONFIG), re.S)
        value = yaml_core.parse(found[1], str(card)).plain() if found else {}
    except (OSError, ValueError):
        return {}
    if not isinstance(value, dict):
        return {}
    is_address = str(value.get("license_link")).startswith("https://")
    return {key: entry for key, entry in value.items() if key != "license_link" or is_address}


def chosen_settings(config: Mapping[str, Any], job: str) -> dict[str, Any]:
    """The keys of a flat config that say how the job trained."""
    own = [f"{job}.{key}" for key in OWN if f"{job}.{key}" in config]
    general = GENERAL if job != "convert" else ("model.dtype",)
    update = () if job == "convert" or f"{job}.optim.lr" in own else (*(LOSS if not own else ()), *UPDATE)
    keys = [key for key in (*own, *update, *general) if key not in SWITCHES or config.get(SWITCHES[key])]
    return {key: config[key] for key in keys if config.get(key) is not None}


def validation_figures(run: Path, step: int) -> dict[str, tuple[Point, Point]]:
    """Metric -> first and last validation up to `step`."""
    try:
        log = read_run(run).between(None, step)
    except (OSError, RunError):  # no step is logged
        return {}
    found = {}
    for key in sorted(log.tags()):
        points = [point for point in log.series(key) if math.isfinite(point[1])]
        if key.startswith(("val-core/", "val/")) and not key.endswith("/std") and points:
            found[key] = points[0], points[-1]
    return found


def model_card(facts: CardFacts, *, is_vision: bool = False, is_adapter: bool = False) -> str:
    """The text of README.md."""
    methods = facts.settings.get("algorithm.adv_estimator"), facts.settings.get(f"{facts.job}.loss_type")
    tags = [
        "hpcrl",
        *([facts.job] if facts.job != "train" else []),
        *(METHODS.get(name, str(name)) for name in methods if name),
    ]
    base = facts.start if is_adapter else facts.base  # adapters are for these weights only
    front = {
        **({} if base is None else {"base_model": base}),
        **({"datasets": list(facts.datasets)} if facts.datasets else {}),
        **facts.license,
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "image-text-to-text" if is_vision else "text-generation",
        "tags": tags,
    }
    named = [name for name in dict.fromkeys((facts.start, facts.base)) if name is not None]
    origin = ", of the model ".join(f"`{name}`" for name in named) or "random weights"
    done = (
        "converted, without training"
        if facts.job == "convert"
        else f"trained by `hpcrl {facts.job}`, {facts.step} steps"
    )
    settings = [(f"`{key}`", yaml_core.dump_flow(value)) for key, value in facts.settings.items()]
    files = [(f"`{name}`", use, rows) for name, use, rows in facts.files]
    figures = [
        (f"`{key}`", *(f"{number(value)} (step {step})" for step, value in points))
        for key, points in facts.figures.items()
    ]
    limits = "evaluated only on what the table says." if figures else "not evaluated in this run."
    license = "" if facts.license else " No licence is stated, because no card of a base model states one."
    command = shlex.join(["hpcrl", *facts.command]).replace("`", "") if facts.command else ""
    parts = [
        f"---\n{yaml_core.dump(front)}---",
        f"# {facts.run}",
        f"From {origin}: {done}.",
        loading(facts, is_vision, is_adapter),
        table(["setting", "value"], settings),
        f"```bash\n{command}\n```" if command else "",
        table(["data", "use", "rows"], files),
        table(["validation", "first", "last"], figures),
        f"Limits: {limits}{license}",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in facts.versions.items()),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def loading(facts: CardFacts, is_vision: bool, is_adapter: bool) -> str:
    """How to load the folder."""
    auto, reader = ("ImageTextToText", "Processor") if is_vision else ("CausalLM", "Tokenizer")
    model = (facts.start or "BASE_MODEL") if is_adapter else "FOLDER"
    lines = [f"from transformers import AutoModelFor{auto}, Auto{reader}", ""]
    lines += [f'model = AutoModelFor{auto}.from_pretrained("{model}")']
    lines += ['model.load_adapter("FOLDER")'] if is_adapter else []
    lines += [f'{reader.lower()} = Auto{reader}.from_pretrained("{model}")']
    served = f"{model} --enable-lora --lora-modules adapter=FOLDER" if is_adapter else model
    return "\n".join(["```python", *lines, "```", "", f"In vLLM: `vllm serve {served}`"])


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; "" without rows."""
    cells = [[printable(cell, one_line=True).replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *cells)) if rows else ""


def public_name(path: str) -> str:
    """The model or dataset of a path in the Hugging Face cache; of another path its last two components that name
    something, without names of users."""
    parts = PurePath(path).parts
    for part in reversed(parts):
        if part.startswith(("models--", "datasets--")):
            return part.split("--", 1)[1].replace("--", "/")
    staged = next((place + 2 for place in range(len(parts) - 1) if is_bundle(*parts[place : place + 2])), 0)
    private = max((place + 2 for place, part in enumerate(parts) if part in HOMES), default=0)
    named = [part for part in parts[max(staged, private) :] if part not in NAMELESS]
    return "/".join([*(part for part in named[-2:-1] if not is_user(part)), *named[-1:]])


def is_bundle(folder: str, inside: str) -> bool:
    """Whether what follows is a path of its own, below the bundle of a submitted job."""
    return folder.startswith("bundle_") and inside == "inputs"


def is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name.removeprefix("~"))
    except KeyError:
        return False
    return True


def public_command(words: Iterable[str]) -> list[str]:
    """The words of a command with public names in place of paths, and without overrides that say where it ran."""
    return [PATH.sub(lambda found: public_name(found[0]), word) for word in words if not WHERE.match(word)]
