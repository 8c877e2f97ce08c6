"""What a run will write to its disk, and whether there is space for it, said once at the start."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.config.derive import Derived
from hpcrl.config.schema import Config
from hpcrl.controller.controller import Controller
from hpcrl.engine.checkpoint.store import CheckpointStore
from hpcrl.forecast.memory.memory import size
from hpcrl.forecast.memory.state import ITEMSIZE, RoleModel, checkpoint_bytes, kept_checkpoints, rollout_bytes
from hpcrl.model.shape import Lora

if TYPE_CHECKING:
    from hpcrl.run.job import TrainingJob

log = logging.getLogger(__name__)


def report(job: TrainingJob, controller: Controller, folder: Path, steps_done: int, total_steps: int) -> None:
    """Log the bytes of a save, of the run and of the free space, and warn if the space will not do."""
    config = job.config
    save = sum(checkpoint_bytes(config, trained_models(job, controller)).values())
    num_kept = kept_checkpoints(config.trainer, total_steps, saves_last=job.saves_last) or 0
    archive = rollout_bytes(config, job.derived) if isinstance(job.derived, Derived) else 0
    existing = len(CheckpointStore(folder / "checkpoints").listed())
    free = shutil.disk_usage(folder).free
    text, missing = forecast(config, save, num_kept, existing, archive, total_steps - steps_done, free)
    log.info("%s", text)
    if missing > 0:
        log.warning(
            "%s has %s free, and the run may write %s more, so that saves may fail; free space, change run.dir, "
            "or lower trainer.max_ckpt_to_keep",
            *(folder, size(free), size(free + missing)),
        )


def trained_models(job: TrainingJob, controller: Controller) -> dict[str, RoleModel]:
    """The models that checkpoints hold, by role."""
    config, inputs, models = job.config, job.inputs, dict[str, RoleModel]()
    for spec in job.all_roles():
        optim = job.models.optimizer(spec)
        if optim is not None and spec.head is not None:
            shape, itemsize = inputs.shapes.get(spec.name, inputs.shape), ITEMSIZE[spec.architecture(config).dtype]
            lora = Lora.from_config(config.model) if spec.path == "actor" else None
            models[spec.name] = RoleModel(shape, controller[spec.name].layout, spec.head, itemsize, optim, lora=lora)
    return models


def forecast(
    config: Config, save: int, num_kept: int, existing: int, archive: int, steps: int, free: int
) -> tuple[str, int]:
    """Text for the log, and the bytes by which the free space is too small; negative if it is not.

    save: bytes of a checkpoint. num_kept: checkpoints that exist at once. existing: those that exist now. archive:
    bytes of a step's rollouts at most. steps: that are left.
    """
    to_come = max(num_kept - existing, 0) * save + archive * steps
    if num_kept == 0:
        saves = f"{size(save)} per save, only if the run is stopped (trainer.save_freq=-1)"
    else:
        rule = config.trainer.max_ckpt_to_keep
        which = "all stay (trainer.max_ckpt_to_keep=null)" if rule is None else f"trainer.max_ckpt_to_keep={rule}"
        saves = f"{size(save)} per save, at most {size(num_kept * save)} in {num_kept} checkpoints, {which}"
    if archive:
        saves += f"; rollouts at most {size(archive)} per step, {size(archive * steps)} in {steps} steps"
    return f"disk: {saves}; {size(free)} free, quotas not counted", to_come - free
