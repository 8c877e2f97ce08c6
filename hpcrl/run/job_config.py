"""The config of a job: values that depend on others, and the config of a job that is given weights only."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from hpcrl.algorithms.parameters import UnknownName
from hpcrl.algorithms.rollout_correction import RolloutCorrection, preset
from hpcrl.config.loader import load_config, quoted_path, raw_value
from hpcrl.config.schema import Config
from hpcrl.config.yaml_core import ConfigError
from hpcrl.engine.checkpoint.store import is_hugging_face
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.job import run_directory

T = TypeVar("T")

ASYNCHRONOUS = "decoupled_token_is"  # truncated importance sampling, token by token


def with_presets(config: Config) -> Config:
    """`config` with the values of algorithm.rollout_correction.preset, where the template gives none of its own.

    An asynchronous mode trains on samples of older weights. If the template chooses no correction there, it gets
    ASYNCHRONOUS; `preset: disabled` is a choice.

    Raises ConfigError for an unknown preset and for values that do not go together.
    """
    section = config.algorithm.rollout_correction
    chosen = (section.preset, section.rollout_is, section.rollout_rs, section.bypass_mode or None)
    if config.async_training.mode != "sync" and all(choice is None for choice in chosen):
        section = section.model_copy(update={"preset": ASYNCHRONOUS, "rollout_is": "token"})
    given = {name: getattr(section, name) for name in section.model_fields_set if name != "preset"}
    values = in_section(
        "algorithm.rollout_correction",
        lambda: preset(section.preset, **given) if section.preset is not None else RolloutCorrection(**given),
    )
    algorithm = config.algorithm.model_copy(update={"rollout_correction": section.model_copy(update=asdict(values))})
    return config.model_copy(update={"algorithm": algorithm})


def softmax_vocab_of(run: Path) -> str:
    """model.softmax_vocab of a run. Runs that began before the key existed have drawn from all ids of the model."""
    return str(raw_value(run / "config.yaml", (), ("model", "softmax_vocab")) or "config")


def with_settings_of_run(config: Config) -> Config:
    """`config`, with the values of the run that it resumes for keys whose default has changed, where the template gives
    none."""
    run = run_directory(config)
    if not any(run.glob("checkpoints/step_*")):
        return config
    try:
        former: dict[str, dict[str, Any]] = {"model": {"softmax_vocab": softmax_vocab_of(run)}}
        if raw_value(run / "config.yaml", (), ("trainer", "max_ckpt_to_keep")) is None:
            former["trainer"] = {"max_ckpt_to_keep": None}
    except ConfigError:  # no config.yaml that can be read
        return config
    for name, values in former.items():
        section = config.section(name)
        update = {key: value for key, value in values.items() if key not in section.model_fields_set}
        config = config.model_copy(update={name: section.model_copy(update=update)})
    return config


def in_section(section: str, make: Callable[[], T]) -> T:
    """The result of `make`, whose ValueError is one of the section."""
    try:
        return make()
    except UnknownName:
        raise  # its line says what is unknown
    except ValueError as error:
        raise ConfigError(f"{section}: {error}") from None


def config_of(source: str, folder: str, overrides: list[str], schema: type[Config]) -> Config:
    """Of a job on the weights of `source`, a Hugging Face directory, a run or a checkpoint, that logs into `folder`.

    The model section comes from the run's config; the other sections, such as the layout of a larger job, do not.
    """
    path, target = Path(os.path.abspath(source)), Path(os.path.abspath(folder))
    name = [f"run.dir={quoted_path(str(target.parent))}", f"run.name={quoted_path(target.name)}"]
    if is_hugging_face(path):
        return load_config(None, [f"model.path={quoted_path(str(path))}", *name, *overrides], schema)
    run = run_of(path)
    if run is None:
        raise InputError(f"{source}: expected a Hugging Face directory, a run or one of its checkpoints")
    model = json.dumps(raw_value(run / "config.yaml", (), ("model",)))  # JSON is YAML
    own = [f"model={model}", f"model.softmax_vocab={softmax_vocab_of(run)}"]
    return load_config(None, [*own, f"model.init_from={quoted_path(str(path))}", *name, *overrides], schema)


def folder_of(source: str, target: str) -> str:
    """Log folder of a conversion: a new run's own, or <run>/convert. Raises InputError if it would overwrite
    something."""
    path = Path(os.path.abspath(source))
    taken = Path(target, "checkpoints") if is_hugging_face(path) else Path(target)
    if taken.exists():
        raise InputError(f"{taken} exists already; remove it, or name another target")
    if is_hugging_face(path):
        return target
    run = run_of(path)
    return str(run / "convert") if run else f"{target}.job"


def run_of(path: Path) -> Path | None:
    """The run to which a run folder, checkpoints folder or step folder belongs, or None."""
    return next((folder for folder in (path, *path.parents[:2]) if (folder / "config.yaml").is_file()), None)
