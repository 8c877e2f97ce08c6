"""The configuration of jobs that are told of weights alone, `hpcrl score` and `hpcrl convert`; without torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hpcrl.checkpoint.store import is_hugging_face
from hpcrl.config.loader import load_config, quoted
from hpcrl.config.schema import Config
from hpcrl.runtime.exits import InputError


def config_of(source: str, folder: str, overrides: list[str]) -> Config:
    """Of a job on the weights of `source`, a Hugging Face directory, a run or a checkpoint, that logs into `folder`.

    A run's configuration says what its model is like; all else, such as the layout of a larger job, is left behind.
    """
    path, target = Path(os.path.abspath(source)), Path(os.path.abspath(folder))
    name = [f"run.dir={quoted(str(target.parent))}", f"run.name={quoted(target.name)}"]
    if is_hugging_face(path):
        return load_config(None, [f"model.path={quoted(str(path))}", *name, *overrides])
    run = _run_of(path)
    if run is None:
        raise InputError(f"{source}: expected a Hugging Face directory, a run or one of its checkpoints")
    model = json.dumps(load_config(run / "config.yaml").model.model_dump())  # JSON is YAML
    return load_config(None, [f"model={model}", f"model.init_from={quoted(str(path))}", *name, *overrides])


def folder_of(source: str, target: str) -> str:
    """Of a conversion's logs: a new run's own, or <run>/convert. InputError where it would write over something."""
    path = Path(os.path.abspath(source))
    taken = Path(target, "checkpoints") if is_hugging_face(path) else Path(target)
    if taken.exists():
        raise InputError(f"{taken} is there already; remove it, or name another target")
    if is_hugging_face(path):
        return target
    run = _run_of(path)
    return str(run / "convert") if run else f"{target}.job"


def _run_of(path: Path) -> Path | None:
    """The run that a run's folder, its checkpoints folder or one step folder is of."""
    return next((folder for folder in (path, *path.parents[:2]) if (folder / "config.yaml").is_file()), None)
