"""The checkpoints of a run, written while training continues, exports of the policy, and space on the disk for them."""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.config.derive import Derived
from hpcrl.config.schema import Config, TrainerConfig
from hpcrl.controller.controller import Controller
from hpcrl.data.tokenizer import end_token_ids, load_tokenizer
from hpcrl.engine.checkpoint.manifest import SavedPart, error_line
from hpcrl.engine.checkpoint.store import CheckpointStore, Retention, is_hugging_face
from hpcrl.forecast.memory.memory import size
from hpcrl.forecast.memory.state import ITEMSIZE, RoleModel, checkpoint_bytes, kept_checkpoints, rollout_bytes
from hpcrl.model.hf_export import ADAPTER_CONFIG, TokenizerFiles, adapter_config, plan_files, write_beside
from hpcrl.model.shape import Lora
from hpcrl.observe.record.progress import PhaseTimers
from hpcrl.run.model_card import README, CardFacts, model_card
from hpcrl.runtime import run_owner
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.key_value_store import KeyValueStore
from hpcrl.runtime.spans import spans

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan
    from transformers import PreTrainedTokenizerBase

    from hpcrl.run.job import TrainingJob

log = logging.getLogger(__name__)

POLL_SECONDS = 0.02  # between two tests for a part


class SaveError(Exception):
    """A failed save; its arguments are one line for each rank that has a problem."""


@dataclass(frozen=True)
class Save:
    """A save in progress. plans: role -> world rank -> what that rank writes. start: of time.perf_counter."""

    step: int
    key: str
    folder: Path
    plans: dict[str, dict[int, SavePlan]]
    state: dict[str, Any]
    metric: float | None
    start: float


class Saver:
    """Writes checkpoints. Lives on rank 0. At most one save is in progress. A thread waits until the parts of all ranks
    are reported in the key-value store, and then commits the checkpoint while training continues."""

    def __init__(
        self,
        key_values: KeyValueStore,
        trainer: TrainerConfig,
        root: Path,
        timers: PhaseTimers,
        saved_step: int | None = None,
        on_saved: Callable[[int, Path], None] | None = None,
    ) -> None:
        """Set up the saver.

        Args:
            saved_step: step of the newest checkpoint.
            on_saved: called with (step, folder) once a checkpoint is complete.
        """
        self._key_values = key_values
        self.saved_step = saved_step
        self._on_saved = on_saved
        self._options = trainer.checkpoint
        self._timers = timers
        self._store = checkpoint_store(trainer, root)
        self._under_way: tuple[Save, Future[float]] | None = None
        self._num_begun = 0
        self._last_failed = False
        self._num_failed = 0
        self._seconds: float | None = None  # of the save that was committed last, until they are reported
        self._has_metric = True

    @property
    def step_under_way(self) -> int | None:
        """Step of the save in progress, or None."""
        return self._under_way[0].step if self._under_way is not None else None

    def begin(
        self,
        controller: Controller,
        step: int,
        roles: tuple[str, ...],
        metrics: Mapping[str, float],
        files: Callable[[Path], dict[str, Any]],
    ) -> None:
        """Begin to save these roles as they are after `step`. Training may continue when this returns.

        `files(folder)` writes further files into the checkpoint and returns the contents of trainer.json.
        """
        self.wait()
        start = time.perf_counter()
        run_owner.check()
        try:
            pending = self._store.begin(step)
            state = files(pending)
        except (InputError, AssertionError):
            raise
        except Exception as error:
            self._fail(step, [f"rank 0: {error_line(error)}"])
            return
        self._num_begun += 1
        key, scratch = f"save/{self._num_begun}", self._options.scratch_dir
        # During training the copy needs memory besides anyway; scratch is for a short pause.
        keep_memory = self._options.async_save and scratch is None
        calls = {role: controller[role].begin_save(str(pending), key, scratch, keep_memory) for role in roles}
        plans = {
            role: dict(zip(controller[role].layout.ranks, call.get(), strict=True)) for role, call in calls.items()
        }
        save = Save(step, key, pending, plans, state, self.metric(step, metrics), start)
        pool = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._under_way = save, pool.submit(self._commit, save)
        pool.shutdown(wait=False)
        if not self._options.async_save:
            self.wait()

    def poll(self) -> None:
        """Finish a save whose thread has ended. Does not wait."""
        if self._under_way is not None and self._under_way[1].done():
            self._end(*self._under_way)

    def wait(self) -> bool:
        """Wait for the save in progress. Returns whether the last save succeeded."""
        if self._under_way is not None:
            self._end(*self._under_way)
        return not self._last_failed

    def metrics(self) -> dict[str, float]:
        """Metrics of saves that have ended: seconds of the last one, and the number that failed."""
        found = {"perf/save_seconds": self._seconds} if self._seconds is not None else {}
        self._seconds = None
        return found | ({"perf/failed_saves": float(self._num_failed)} if self._num_failed else {})

    def _commit(self, save: Save) -> float:
        """Wait for all parts and commit the checkpoint, on the thread. Returns the seconds of the save."""
        from hpcrl.engine.checkpoint.sharded_save import describe

        parts = wait_for_parts(self._key_values, save.key, save.plans)
        run_owner.check()
        files = [entry for of_role in parts.values() for part in of_role for entry in part.files]
        for role, plans in save.plans.items():
            files.append(describe(save.folder / role, list(plans.values()), parts[role]))
        began = time.perf_counter()
        run_owner.check()
        self._store.commit(save.step, save.state, files, save.metric)
        spans.add_beside("commit", f"commit checkpoint of step {save.step}", began, time.perf_counter())
        return time.perf_counter() - save.start

    def _end(self, save: Save, committed: Future[float]) -> None:
        try:
            self._seconds = committed.result()
        except Exception as error:
            self._fail(
                save.step, list(error.args) if isinstance(error, SaveError) else [f"rank 0: {error_line(error)}"]
            )
            return
        self.saved_step, self._under_way, self._last_failed = save.step, None, False
        self._timers.took("save_checkpoint", self._seconds)  # of a save that the loop waits for
        log.info("saved %s", self._store.folder(save.step))
        if self._on_saved is not None:
            self._on_saved(save.step, self._store.folder(save.step))

    def _fail(self, step: int, problems: list[str]) -> None:
        run_owner.check()
        self._store.discard(step)
        self._under_way, self._last_failed = None, True
        self._num_failed += 1
        more = f" (and {len(problems) - 1} more ranks)" if len(problems) > 1 else ""
        newest = self._store.newest()
        others = f"{newest} is still the newest checkpoint" if newest else "without a checkpoint"
        log.warning(
            "the checkpoint of step %d could not be written: %s%s; training continues, %s",
            *(step, problems[0], more, others),
        )

    def metric(self, step: int, metrics: Mapping[str, float]) -> float | None:
        """Value of best_metric after a step; None without one."""
        name = self._options.best_metric
        if name is None:
            return None
        if name in metrics:
            return metrics[name] if math.isfinite(metrics[name]) else None
        if self._has_metric:
            validated = ", ".join(key for key in metrics if key.startswith(("val-core/", "val/"))) or "none"
            log.warning(
                "trainer.checkpoint.best_metric=%s is not among the metrics of step %d, so its checkpoint is none of "
                "the best; validation metrics of that step: %s",
                *(name, step, validated),
            )
        self._has_metric = False
        return None


def checkpoint_store(trainer: TrainerConfig, root: Path) -> CheckpointStore:
    """The checkpoints in the folder `root`, of which trainer.checkpoint says which ones stay."""
    options = trainer.checkpoint
    kept = trainer.max_ckpt_to_keep, options.keep_every, options.keep_best
    return CheckpointStore(root, Retention(*kept, options.best_metric, options.best_mode == "max"))


def wait_for_parts(
    key_values: KeyValueStore, key: str, ranks: Mapping[str, Iterable[int]]
) -> dict[str, list[SavedPart]]:
    """Wait for the parts of these ranks, by role. Raises SaveError if some have a problem."""
    parts = {
        role: [_wait_for_part(key_values, f"{key}/{role}/{rank}") for rank in of_role]
        for role, of_role in ranks.items()
    }
    problems = [part.problem for of_role in parts.values() for part in of_role if part.problem is not None]
    if problems:
        raise SaveError(*problems)
    return parts


def _wait_for_part(key_values: KeyValueStore, key: str) -> SavedPart:
    """Wait for a rank's part."""
    while (text := key_values.get(key)) is None:
        time.sleep(POLL_SECONDS)
    key_values.delete(key)
    return SavedPart.from_json(text)


def export(
    controller: Controller,
    config: Config,
    folder: Path,
    facts: CardFacts,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Write the policy as a Hugging Face directory to `folder`, which is made. On rank 0; raises OSError.

    Args:
        facts: facts about these weights.
        tokenizer: the policy's tokenizer, if it is loaded.
    """
    folder.mkdir(parents=True)
    shape = controller["export"].shape().get()[0]
    raise_first(controller["export"].write(str(folder)).get())
    named = config.model.path or config.model.init_from
    like = Path(named) if named is not None and is_hugging_face(Path(named)) else None
    itemsize = ITEMSIZE[config.model.dtype]
    files = plan_files(shape, itemsize, controller["export"].layout.size)
    write_beside(folder, files, shape, itemsize, config.model.dtype, like, tokenizer_files(config, tokenizer))
    (folder / README).write_text(model_card(facts, is_vision=shape.vision is not None), encoding="utf-8")


def tokenizer_files(config: Config, tokenizer: PreTrainedTokenizerBase | None = None) -> TokenizerFiles | None:
    """What an export says of the policy's tokenizer, loaded unless given; None if its directory is not there."""
    named = config.model.tokenizer or config.model.path
    if named is None or not Path(named).is_dir():
        return None
    if tokenizer is None:
        tokenizer = load_tokenizer(named)
    ends = end_token_ids(tokenizer)
    ids: dict[str, int | list[int]] = {"eos_token_id": ends[0] if len(ends) == 1 else list(ends)}
    ids["pad_token_id"] = ends[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if tokenizer.bos_token_id is not None:
        ids["bos_token_id"] = tokenizer.bos_token_id
    return TokenizerFiles(Path(named), ids, config.data.chat_template)


def export_adapter(controller: Controller, config: Config, folder: Path, facts: CardFacts) -> None:
    """Write the policy's adapters in PEFT's format to `folder`, which is made. On rank 0; raises OSError."""
    folder.mkdir(parents=True)
    shape, lora = controller["export"].shape().get()[0], Lora.from_config(config.model)
    assert lora is not None
    raise_first(controller["export"].write_adapter(str(folder)).get())
    named = config.model.init_from or config.model.path
    base = named if named is not None and is_hugging_face(Path(named)) else None
    settings = adapter_config(shape, lora, base)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    card = model_card(facts, is_vision=shape.vision is not None, is_adapter=True)
    (folder / README).write_text(card, encoding="utf-8")


def raise_first(problems: Iterable[tuple[int | None, str, str] | None]) -> None:
    """Raise OSError for the first problem of a rank, if there is one.

    Args:
        problems: arguments of OSError, by rank.
    """
    for problem in problems:
        if problem is not None:
            raise OSError(*problem)


def report_disk(job: TrainingJob, controller: Controller, folder: Path, steps_done: int, total_steps: int) -> None:
    """Log the bytes of a save, of the run and of the free space, and warn if the space will not do."""
    config = job.config
    save = sum(checkpoint_bytes(config, trained_models(job, controller)).values())
    num_kept = kept_checkpoints(config.trainer, total_steps, saves_last=job.saves_last) or 0
    archive = rollout_bytes(config, job.derived) if isinstance(job.derived, Derived) else 0
    existing = len(CheckpointStore(folder / "checkpoints").listed())
    free = shutil.disk_usage(folder).free
    text, missing = disk_forecast(config, save, num_kept, existing, archive, total_steps - steps_done, free)
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


def disk_forecast(
    config: Config, save: int, num_kept: int, existing: int, archive: int, steps: int, free: int
) -> tuple[str, int]:
    """Text for the log, and the bytes by which the free space is too small; negative if it is not.

    Args:
        save: bytes of a checkpoint.
        num_kept: checkpoints that exist at once.
        existing: checkpoints that exist now.
        archive: bytes of a step's rollouts at most.
        steps: steps that are left.
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
