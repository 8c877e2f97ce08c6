"""The controller's side of an export; light, as the command line imports it before it knows the job."""

from __future__ import annotations

import json
from pathlib import Path

from hpcrl.checkpoint.store import is_hugging_face
from hpcrl.config.schema import Config
from hpcrl.controller.controller import Controller
from hpcrl.model.hf.files import ADAPTER_CONFIG, adapter_config, plan_files, write_beside
from hpcrl.model.shape import Lora
from hpcrl.plan.state import ITEMSIZE


def export(controller: Controller, config: Config, folder: Path) -> None:
    """The policy as a Hugging Face directory, `folder`, which is made. On rank 0; raises OSError."""
    folder.mkdir(parents=True)
    shape = controller["export"].shape().get()[0]
    _raise(controller["export"].write(str(folder)).get())
    like = Path(config.model.path) if config.model.path is not None else None
    tokenizer = config.model.tokenizer or config.model.path
    itemsize = ITEMSIZE[config.model.dtype]
    files = plan_files(shape, itemsize, controller["export"].layout.size)
    write_beside(folder, files, shape, itemsize, config.model.dtype, like, Path(tokenizer) if tokenizer else None)


def export_adapter(controller: Controller, config: Config, folder: Path) -> None:
    """The policy's adapters in PEFT's format in `folder`, which is made. On rank 0; raises OSError."""
    folder.mkdir(parents=True)
    shape, lora = controller["export"].shape().get()[0], Lora.from_config(config.model)
    assert lora is not None
    _raise(controller["export"].write_adapter(str(folder)).get())
    named = config.model.init_from or config.model.path
    base = named if named is not None and is_hugging_face(Path(named)) else None
    settings = adapter_config(shape, lora, base)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _raise(problems: list[tuple[int | None, str, str] | None]) -> None:
    for problem in problems:
        if problem is not None:
            raise OSError(*problem)
