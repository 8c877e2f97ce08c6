"""Recorded steps of a run, taken again: the run's own job, from its nearest earlier checkpoint, on recorded samples.

The tokens of a step's update are written for people and for notebooks.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hpcrl.config.derive import RoleLayouts
from hpcrl.config.loader import job_file, load_config, quoted_path, raw_value
from hpcrl.config.paths import KEYS as INPUT_FILES
from hpcrl.config.schema import Config
from hpcrl.config.yaml_core import ConfigError
from hpcrl.engine.checkpoint.store import TRAINER_FILE, CheckpointStore
from hpcrl.observe.read.agreement import Agreement, compare_archives, compare_metrics
from hpcrl.observe.read.archive import Columns, read_samples, read_step
from hpcrl.observe.read.runlog import read_run
from hpcrl.observe.record.archive import UPDATE_COLUMNS, step_path
from hpcrl.observe.record.writer import METRICS_FILE, json_line
from hpcrl.run.job import SupervisedJob, TrainingJob
from hpcrl.run.job_config import softmax_vocab_of
from hpcrl.run.job_parts import Validation
from hpcrl.run.run import Run, versions
from hpcrl.runtime import run_owner
from hpcrl.runtime.exits import DONE, OTHER, InputError
from hpcrl.runtime.job import run_directory
from hpcrl.sandbox.foreign_files import MOST_CONFIG, read_json, read_text
from hpcrl.sandbox.new_files import draft_of, replace_json

log = logging.getLogger(__name__)

TOKEN_SUFFIXES = (".jsonl", ".h5")
# Columns of an archive that have an entry per response token and say what the update did with it.
TOKEN_COLUMNS = (
    *("response_mask", "rollout_log_probs", "old_log_probs", *UPDATE_COLUMNS),
    *("ref_log_prob", "values", "advantages", "returns", "rollout_is_weights", "loss_mask"),
)


def write_tokens(path: Path, archive: Path) -> None:
    """Write the response tokens of a step's archive, with the ratio of the probabilities at the update and whether the
    loss was clipped there.

    .jsonl: one object per sample, with a list per column. .h5: the archive, with the columns `ratio` (float32) and
    `clipped` (uint8). Raises ArchiveError.
    """
    tokens, samples, _ = read_step(archive)
    added = columns_of_update(tokens)
    with draft_of(path) as draft:
        if path.suffix == ".h5":
            import h5py

            shutil.copyfile(archive, draft)
            with h5py.File(draft, "r+") as file:
                for name, (values, offsets) in added.items():
                    group = file["tokens"].create_group(name)
                    group.create_dataset("values", data=values)
                    group.create_dataset("offsets", data=offsets)
        else:
            with open(draft, "w", encoding="utf-8") as file:
                file.writelines(json_line(row) for row in token_rows({**tokens, **added}, samples))


def columns_of_update(tokens: Columns) -> Columns:
    """Return `ratio`, the probability at the update over the old one, float32, and `clipped`, 1 where the loss has no
    gradient although the token counts and has an advantage, uint8; {} without the columns of the update."""
    if not {"update_log_probs", "loss_gradients", "old_log_probs", "advantages"} <= tokens.keys():
        return {}
    now, offsets = tokens["update_log_probs"]
    ratio = np.exp(now.astype(np.float64) - tokens["old_log_probs"][0]).astype(np.float32)
    counts = tokens["loss_mask" if "loss_mask" in tokens else "response_mask"][0] != 0
    clipped = (tokens["loss_gradients"][0] == 0) & (tokens["advantages"][0] != 0) & counts
    return {"ratio": (ratio, offsets), "clipped": (clipped.astype(np.uint8), offsets)}


def token_rows(tokens: Columns, samples: dict[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    """One object per sample."""
    ids, starts = tokens["input_ids"]
    shown = [name for name in (*TOKEN_COLUMNS, "ratio", "clipped") if name in tokens]
    for index, uid in enumerate(samples["uid"]):
        prompt = int(samples["prompt_length"][index])
        row = {"uid": uid, "sample_index": int(samples["sample_index"][index]), "score": float(samples["score"][index])}
        row["token_ids"] = ids[starts[index] + prompt : starts[index + 1]].tolist()
        for name in shown:
            values, offsets = tokens[name]
            row[name] = values[offsets[index] : offsets[index + 1]].tolist()
        yield row


RESULT_FILE = "replay.json"  # in the replay's folder
FIXED = (  # a replay generates, validates, saves and reports nothing
    "async_training.mode=sync",
    "data.val_files=[]",
    "job.machine=null",
    "job.on_event=[]",
    "rollout.engine=native",
    "trainer.logger=[]",
    "trainer.resume_mode=auto",
    "trainer.save_freq=-1",
    "trainer.save_hf=false",
    "trainer.save_rollouts=true",
    "trainer.reuse_rollouts=false",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "trainer.validation_data_dir=null",
    "trainer.profile_steps=[]",
)
# Overrides that change how the numbers are computed and not which: regular expressions of keys.
ALLOWED = (
    r"placement(\..*)?",
    r".*\.[a-z_]*max_token_len_per_gpu",
    r".*\.(param|grad|optimizer)_offload",
    r"model\.(recompute|ddp)(\..*)?",
    r"model\.(gradient_accumulation_fusion|transformer_engine\.enable|vision\.cache_gib)",
    r"(rollout|reward\.judge)\.(max_num_seqs|max_num_batched_tokens|gpu_memory_utilization|kv_cache_gib|enforce_eager)",
    r"rollout\.(enable_prefix_caching|free_cache_engine|checkpoint_engine(\..*)?)",
    r"run\.(c10d_backend|nccl_timeout|cpu_bind|full_determinism|memory_snapshot|watchdog(\..*)?)",
    r"trainer\.(head_chunk_tokens|balance_batch|walltime_margin)",
    r"(data\.image_workers|reward\.num_workers)",
    *(re.escape(key) for key in INPUT_FILES if key != "trainer.rollouts_from"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step, counted from 1")
    parser.add_argument("--out", metavar="FOLDER", help="folder of the replay; default: RUN/replay/step_N")
    parser.add_argument(
        "--rtol",
        type=float,
        default=1e-5,
        help="difference that is rounding, of numbers above 1 relative (%(default)g)",
    )
    parser.add_argument("--tokens", metavar="FILE", help="write every token of step N to FILE.jsonl or FILE.h5")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="a layout, or another key that a replay takes"
    )


def job_of(run: Path, overrides: Sequence[str]) -> str:
    """The job of a run: the name of a built-in one, or a user's file."""
    path = run / "config.yaml"
    if not path.is_file():
        raise InputError(f"{run} is no run's folder: it has no config.yaml; expected <run.dir>/<run.name> of a run")
    file = job_file(path, overrides)
    if file is not None:
        return file
    named = re.match(r"# hpcrl (\w+)\n", read_text(path, most=MOST_CONFIG))
    return named[1] if named else str(_saved(run).get("job", "train"))


def replayed(job: type[Any]) -> type[TrainingJob]:
    """The job that takes recorded steps of a run of `job` again."""
    if not issubclass(job, TrainingJob):
        raise InputError(f"a run of `hpcrl {job.name}` has no steps to replay; name a run that trains")
    return type(f"{job.__name__}Replay", (Replay, job), {"config_class": job.schema(), "__doc__": Replay.__doc__})


class Replay(TrainingJob):
    """Run recorded steps of a run again, up to step N, and compare metrics and columns with those of the run."""

    handles_signals = False
    saves_last = False
    validation_class = Validation  # there is none
    starts: ClassVar[dict[int, Path]]  # checkpoints from which it may start; on rank 0
    first: int  # step that is taken; on rank 0
    versions_then: dict[str, str]  # those of the checkpoint; on rank 0

    @classmethod
    def load(cls, arguments: argparse.Namespace) -> Config:
        """The run's config with what a replay changes."""
        run, step = Path(os.path.abspath(arguments.run)), arguments.step
        check_overrides(arguments.overrides)
        check_tokens(arguments.tokens, needs_rollouts(cls))
        rows = read_run(run / METRICS_FILE).rows
        if step < 1 or step not in rows:
            raise InputError(f"{run}: step {step} is not in {METRICS_FILE}, which has steps {min(rows)} to {max(rows)}")
        cls.starts = starts_of(run, step, needs_rollouts(cls))
        then = f"model.softmax_vocab={softmax_vocab_of(run)}"
        overrides = [then, *arguments.overrides, *FIXED, *_own(run, cls.starts, arguments, cls)]
        folder = folder_of(run, step, arguments.out)
        overrides += [f"run.dir={quoted_path(str(folder.parent))}", f"run.name={quoted_path(folder.name)}"]
        placement = [text for text in overrides if text.startswith("placement")]
        config = cls.read_config(str(run / "config.yaml"), [text for text in overrides if text not in placement])
        if placement:
            plain = load_config(None, placement, cls.schema()).placement
            config = config.model_copy(update={"placement": plain})
        return cls.prepare(config)

    @classmethod
    def prepare_folder(cls, config: Config, arguments: argparse.Namespace) -> None:
        """Empty the folder of an earlier replay, and link the checkpoints from which this one may start."""
        folder = run_directory(config)
        try:
            for path in folder.iterdir():
                if path.name == run_owner.FOLDER:
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            replace_json(folder / RESULT_FILE, {"run": os.path.abspath(arguments.run), "step": arguments.step})
            for number, checkpoint in cls.starts.items():
                (folder / "checkpoints").mkdir(exist_ok=True)
                (folder / "checkpoints" / f"step_{number:08d}").symlink_to(checkpoint)
        except OSError as error:
            raise InputError(f"cannot write {folder}: {error.strerror or error}; name a folder with --out") from error

    @classmethod
    def check(cls, config: Config, num_ranks: int) -> RoleLayouts:
        try:
            return super().check(config, num_ranks)
        except ConfigError as error:
            if not str(error).startswith("placement"):
                raise
            raise ConfigError(f'{error}; placement.pools.all="*" makes the replay data-parallel on all ranks') from None

    @property
    def last_step(self) -> int:
        return int(self.arguments.step)

    def total_steps(self) -> int:
        return max(super().total_steps(), self.last_step)

    def set_up(self, run: Run) -> None:
        self.first, self.versions_then = run.start.step + 1, run.start.state.get("versions", {})
        recorded = self.source / "rollouts"
        if needs_rollouts(type(self)) and (missing := missing_steps(recorded, self.first, self.last_step)):
            raise InputError(
                f"{step_path(recorded, missing[0])}: no such rollout file; the replay starts at {self.first}"
            )
        super().set_up(run)

    @property
    def source(self) -> Path:
        """The run that is replayed."""
        return Path(os.path.abspath(self.arguments.run))

    def main(self) -> int:
        code = super().main()
        return self.compare() if code == DONE and self.world.rank == 0 else code

    def compare(self) -> int:
        """Compare the steps taken, on rank 0; returns the exit code."""
        folder, rtol = run_directory(self.config), self.arguments.rtol
        logged, replayed = read_run(self.source / METRICS_FILE).rows, read_run(folder / METRICS_FILE).rows
        results = []
        for step in range(self.first, self.last_step + 1):
            if step not in logged or step not in replayed:
                log.warning("step %d is not compared: %s has no such line", step, METRICS_FILE)
                continue
            result = Agreement(step, rtol)
            compare_metrics(logged[step], replayed[step], result)
            if needs_rollouts(type(self)):
                compare_archives(self.source / "rollouts", folder / "rollouts", result)
            (log.info if result.agrees else log.error)("%s", result)
            results.append(result)
        if not all(result.is_bitwise for result in results):
            log.info("other than in the run: %s", "; ".join(self.changes()) or "the machine, its threads or the code")
        run_owner.check()
        record: dict[str, Any] = {"run": str(self.source), "step": self.last_step, "first_step": self.first}
        replace_json(folder / RESULT_FILE, record | {"results": [str(result) for result in results]})
        if self.arguments.tokens:
            write_tokens(Path(self.arguments.tokens), step_path(folder / "rollouts", self.last_step))
            log.info("the tokens of step %d are in %s", self.last_step, self.arguments.tokens)
        return DONE if results and all(result.agrees for result in results) else OTHER

    def changes(self) -> list[str]:
        """What is not as it was in the run, and changes the last bits of its numbers."""
        now, ranks = versions(), len(list((self.source / "logs").glob("rank_*.log")))
        changes = [
            f"{name} {now[name]}, was {then}" for name, then in self.versions_then.items() if now.get(name) != then
        ]
        if ranks != self.world.size:
            changes.append(f"the number of ranks, {self.world.size}, was {ranks}")
        if any(text.startswith("placement") for text in self.arguments.overrides):
            changes.append("the placement")
        return changes


def needs_rollouts(job: type[TrainingJob]) -> bool:
    """Whether a step of the job trains on samples of the policy."""
    return not issubclass(job, SupervisedJob)


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise InputError for an override that may change the numbers."""
    allowed = re.compile("|".join(ALLOWED))
    for text in overrides:
        key = text.partition("=")[0].strip()
        if not allowed.fullmatch(key):
            raise InputError(
                f"replay: {key} may change what is computed; a replay takes layouts (placement.*), micro-batches "
                "(*max_token_len_per_gpu), offload, model.recompute, sizes of engines and paths of input files"
            )


def check_tokens(path: str | None, has_rollouts: bool) -> None:
    """Raise InputError if the file for the tokens cannot be written."""
    if path is None:
        return
    if not has_rollouts:
        raise InputError(
            "--tokens: the job of this run trains on given answers, which have no advantages; leave it out"
        )
    if Path(path).suffix not in TOKEN_SUFFIXES:
        raise InputError(f"--tokens {path}: expected a file name that ends in {' or '.join(TOKEN_SUFFIXES)}")
    if not Path(path).absolute().parent.is_dir():
        raise InputError(f"--tokens {path}: no such folder; make {Path(path).parent}")


def missing_steps(rollouts: Path, first: int, last: int) -> list[int]:
    return [step for step in range(first, last + 1) if not step_path(rollouts, step).is_file()]


def starts_of(run: Path, step: int, needs_samples: bool) -> dict[int, Path]:
    """Checkpoints from which `step` can be replayed, by their steps, the nearest first; {}: only from the run's start.

    Raises InputError if there is no such start, and ArchiveError for a damaged rollout file.
    """
    rollouts = run / "rollouts"
    checkpoints = {number: folder for number, folder in CheckpointStore(run / "checkpoints").listed() if number < step}
    nearest = max(checkpoints, default=0)
    if not needs_samples:
        return checkpoints
    missing = missing_steps(rollouts, nearest + 1, step)
    if missing and not checkpoints:
        raise InputError(
            f"{run} has no checkpoint before step {step}, and no rollouts of step {missing[0]}; a replay needs a "
            "checkpoint, or the rollouts of all steps from 1"
        )
    if missing:
        raise InputError(
            f"{step_path(rollouts, missing[0])}: no such rollout file; from {checkpoints[nearest].name} the replay "
            f"needs those of steps {nearest + 1} to {step}"
        )
    for recorded in range(nearest + 1, step + 1):
        read_samples(step_path(rollouts, recorded))
    return {number: folder for number, folder in checkpoints.items() if not missing_steps(rollouts, number + 1, step)}


def _own(run: Path, starts: dict[int, Path], arguments: argparse.Namespace, job: type[TrainingJob]) -> list[str]:
    """Overrides of this replay."""
    overrides = arguments.overrides
    additions = [f"{job.name}.eval_freq=-1"] if issubclass(job, SupervisedJob) else []
    if needs_rollouts(job):
        additions.append(f"trainer.rollouts_from={quoted_path(str(run / 'rollouts'))}")
    if arguments.tokens:
        additions.append(f"trainer.record_update_steps=[{arguments.step}]")
    began_with = _saved(run).get("init_from")
    given = raw_value(run / "config.yaml", (), ("model", "init_from"))
    if not starts and given and began_with and not any(text.startswith("model.init_from=") for text in overrides):
        additions.append(f"model.init_from={quoted_path(began_with)}")  # `given` may have newer contents now
    return additions


def _saved(run: Path) -> dict[str, Any]:
    """The trainer.json of a checkpoint of the run, not verified; {} if there is none."""
    for _, folder in CheckpointStore(run / "checkpoints").listed():
        with suppress(OSError, ValueError):
            state = read_json(folder / TRAINER_FILE)
            if isinstance(state, dict):
                return state
    return {}


def folder_of(run: Path, step: int, out: str | None) -> Path:
    """The folder of the replay. Raises InputError for one that holds something else."""
    folder = Path(os.path.abspath(out)) if out is not None else run / "replay" / f"step_{step:08d}"
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if folder.exists() and not names <= {run_owner.FOLDER} and RESULT_FILE not in names:
        raise InputError(f"--out {folder} exists and is not the folder of a replay; name another one")
    return folder
