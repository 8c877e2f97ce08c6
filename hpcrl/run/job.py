"""What a job is: config section, checks, roles and loop in one file; and how one runs on all ranks."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
from pydantic import Field, PositiveInt

from hpcrl.config.derive import RoleLayouts, check_lengths
from hpcrl.config.loader import load_config, quoted_path
from hpcrl.config.plugins import load_plugins
from hpcrl.config.roles import ACTOR, RoleSpec, place, with_own
from hpcrl.config.rules import check_checkpoints
from hpcrl.config.schema import Config, OptimConfig, PositiveOrMinusOne, Section, extended
from hpcrl.config.yaml_core import ConfigError
from hpcrl.data.prompts import PromptDataset
from hpcrl.data.sampler import OrderedSampler, file_order, steps_for_epochs
from hpcrl.data.supervision import Supervised, Supervision
from hpcrl.data.tokenizer import tokenizer_of
from hpcrl.observe.record.trackers import missing_packages
from hpcrl.rollout.environments.tools import data_config
from hpcrl.run.former_members import FormerMembers
from hpcrl.run.job_config import with_presets, with_settings_of_run
from hpcrl.run.job_parts import EPOCH, TOTAL_NUM_TOKENS, Models, Report, SavedState, Validation
from hpcrl.runtime.exits import DONE, REQUEUE, InputError
from hpcrl.runtime.world import World

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpcrl.batch.data_proto import DataProto
    from hpcrl.controller.controller import Controller
    from hpcrl.controller.register import Worker
    from hpcrl.observe.trace.rank_trace import RankTrace
    from hpcrl.run.run import Run
    from hpcrl.run.start import Start
    from hpcrl.workers.team import Inputs, Team

log = logging.getLogger(__name__)


def builtin_jobs() -> dict[str, type[Job]]:
    """Name -> class of the jobs in hpcrl/jobs, which are found by file."""
    folder = Path(__file__).parents[1] / "jobs"
    return {path.stem: import_module(f"hpcrl.jobs.{path.stem}").JOB for path in sorted(folder.glob("[!_]*.py"))}


class Job:
    """A subcommand that runs on all ranks, `hpcrl <name> CONFIG [key=value ...]`.

    Importing a built-in job's file must not import torch, because a login node may not have it. Modules that build
    models are imported in the methods that run on ranks.
    """

    name: ClassVar[str]
    handles_signals: ClassVar[bool] = False  # it saves and stops on a signal, to be continued by another slice
    can_be_submitted: ClassVar[bool] = True  # `hpcrl submit <name>:CONFIG`
    memory_advice: ClassVar[str] = ""  # keys that make it need less GPU memory
    section: ClassVar[type[Section] | None] = None  # the config section <name>
    own_roles: ClassVar[tuple[type[Worker], ...]] = ()  # workers of further roles, or in place of built-in ones
    trained_role: ClassVar[str | None] = None
    saves_last: ClassVar[bool] = False  # a checkpoint after the last step, whatever trainer.save_freq is
    config_class: ClassVar[type[Config]]  # made by `schema`
    file: ClassVar[str | None] = None  # of a user's job

    def __init__(self, world: World, config: Config, derived: Any, arguments: argparse.Namespace) -> None:
        self.world, self.config, self.derived, self.arguments = world, config, derived, arguments

    @classmethod
    def schema(cls) -> type[Config]:
        """The class of the job's config: with its own section and roles, and the sections of all built-in jobs, because
        jobs share templates. Every rank calls this before it receives a config."""
        if "config_class" not in cls.__dict__:
            declared = [(job.name, job.__dict__.get("section")) for job in (*builtin_jobs().values(), cls)]
            sections = {name: section for name, section in declared if section is not None}
            specs = cls.own_specs()
            sections |= {spec.name: spec.section for spec in specs if isinstance(spec.section, type)}
            placed = [spec.name for spec in specs if not spec.on]
            name = f"{cls.__qualname__}.config_class"
            cls.config_class = extended(Config, sections, placed, qualname=name, module=cls.__module__)
        return cls.config_class

    @classmethod
    def section_of(cls, config: Config) -> Any:
        """The config section that the job declares, or the job that it extends."""
        declaring = next(job for job in cls.__mro__ if job.__dict__.get("section") is not None)
        return config.section(declaring.__dict__["name"])

    @property
    def own(self) -> Any:
        return self.section_of(self.config)

    @classmethod
    def own_specs(cls) -> list[RoleSpec]:
        """The declarations of `own_roles`."""
        return [replace(worker.spec, worker=worker) for worker in cls.own_roles]

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("config", metavar="CONFIG", help="YAML file")
        add_overrides(parser)

    @classmethod
    def run_without_ranks(cls, arguments: argparse.Namespace) -> bool:
        """Do what these arguments ask for, if it needs neither a config nor MPI; whether they do."""
        return False

    @classmethod
    def load(cls, arguments: argparse.Namespace) -> Config:
        """The job's config, read on rank 0."""
        return cls.prepare(cls.read_config(arguments.config, arguments.overrides))

    @classmethod
    def read_config(cls, path: str, overrides: Sequence[str] = ()) -> Config:
        """The config of a YAML file and overrides, without values filled in."""
        own = [f"run.job_file={quoted_path(cls.file)}"] if cls.file is not None else []
        return load_config(path, [*overrides, *own], cls.schema())

    @classmethod
    def prepare(cls, config: Config) -> Config:
        """The config with values that depend on others filled in."""
        return with_presets(config)

    @classmethod
    def prepare_folder(cls, config: Config, arguments: argparse.Namespace) -> None:
        """Make what the run's folder has to hold before the job starts, on rank 0, once the job owns the folder."""

    @classmethod
    def check(cls, config: Config, num_ranks: int) -> RoleLayouts:
        """Derive layouts and sizes; raise ConfigError, one line, for a job that cannot run. Imports no torch."""
        raise NotImplementedError(f"{cls.__name__} has no check(config, num_ranks)")

    @classmethod
    def check_with_torch(cls, config: Config, num_ranks: int) -> RoleLayouts:
        """As `check`, with what only torch can check; on every rank."""
        return cls.check(config, num_ranks)

    @classmethod
    def without_effect(cls, config: Config) -> list[str]:
        """A line for each setting that this job does not read."""
        return []

    def main(self) -> int:
        """Run the job; returns the exit code. Collective over the world."""
        raise NotImplementedError(f"{type(self).__name__} has no main()")

    def run_program(self, team: Team, program: Any, trace: RankTrace | None = None) -> Any:
        """Run `program(controller)` on rank 0 while the other ranks serve its calls. Returns its result, None
        elsewhere.

        Args:
            trace: where this rank's trace is written.
        """
        from hpcrl.controller.controller import run_program

        return run_program(self.world, team.workers, team.worker_classes, team.layouts, program, trace)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="override a key: actor.optim.lr=2e-6"
    )


class WeightsJob(Job):
    """A job that reads the weights of a policy, in the actor's layout, and needs no config file."""

    can_be_submitted = False
    runs_model: ClassVar[bool] = False
    derived: RoleLayouts

    @classmethod
    def check(cls, config: Config, num_ranks: int) -> RoleLayouts:
        return RoleLayouts(num_ranks, place(config, [ACTOR], num_ranks), [])

    def build(self, roles: Sequence[RoleSpec]) -> tuple[Team, Path | None]:
        """The team of these roles, and the weights of model.init_from or model.path. Collective."""
        from hpcrl.run.start import find_start
        from hpcrl.workers.team import Inputs, build_team, policy_shape

        shape = self.world.run_collectively(lambda: policy_shape(self.config, is_run=self.runs_model))
        source = find_start(self.world, self.config).init_from
        return build_team(self.world, self.config, self.derived, Inputs(shape), roles), source


class TrainingJob(Job, FormerMembers):
    """A job that takes steps and can be continued after any of them. Its life-cycle is that of `Run`.

    A job defines `check`, `read_inputs`, `roles`, `total_steps` and `loop`, and `rows_per_step` if it reads rows in
    order. All else has defaults. Parts of a job are objects of the classes that it names: `report_class`,
    `validation_class`, `models_class`, `saved_state_class`.
    """

    def read_inputs(self) -> Inputs:
        """Read files, on every rank. An InputError ends the job on all of them."""
        raise NotImplementedError

    def roles(self) -> Sequence[RoleSpec]:
        """The built-in roles that this job has, in the order in which they are built."""
        raise NotImplementedError

    def total_steps(self) -> int:
        """Steps of the whole run, once `start` is set."""
        raise NotImplementedError

    def loop(self, run: Run) -> None:
        """`for step in run.steps(): ...`, on rank 0."""
        raise NotImplementedError

    inputs: Inputs  # what `read_inputs` returned
    start: Start
    handles_signals = True
    trained_role: ClassVar[str] = "actor"
    saves_last: ClassVar[bool] = True
    rows_per_step: int = 0  # of the training data; 0: the job has no position in them, and no epochs
    report_class: ClassVar[type[Report]] = Report
    validation_class: ClassVar[type[Validation]] = Validation
    models_class: ClassVar[type[Models]] = Models
    saved_state_class: ClassVar[type[SavedState]] = SavedState

    def __init__(self, world: World, config: Config, derived: Any, arguments: argparse.Namespace) -> None:
        super().__init__(world, config, derived, arguments)
        self.report, self.validation = self.report_class(self), self.validation_class(self)
        self.models, self.saved_state = self.models_class(self), self.saved_state_class(self)

    def set_up(self, run: Run) -> None:
        """Make what the loop uses, on rank 0, before state is loaded into it."""

    @property
    def last_step(self) -> int | None:
        """The step after which the run ends though more are left, as in a replay; None: after all steps."""
        return None

    @classmethod
    def load(cls, arguments: argparse.Namespace) -> Config:
        config = with_settings_of_run(super().load(arguments))
        if missing := missing_packages(config.trainer.logger):
            raise InputError(
                f"trainer.logger names {missing[0]}, which is not installed; install it with "
                f"`pip install 'hpcrl[{missing[0]}]'`, or leave it out"
            )
        return config

    @classmethod
    def check_with_torch(cls, config: Config, num_ranks: int) -> RoleLayouts:
        load_plugins(config)  # they may register what `check` looks up
        return super().check_with_torch(config, num_ranks)

    def read_rows(self, paths: Sequence[str], tokenizer: PreTrainedTokenizerBase, **which: Any) -> Any:
        """The data set of these files. Collective.

        Args:
            which: `max_samples`, `images` and `only`, as in PromptDataset.
        """
        return PromptDataset(paths, tokenizer, data_config(self.config), world=self.world, **which)

    def supervised(self, dataset: Any, row: int) -> list[Supervised]:
        """The sequences of a row of `read_rows`, and which of their tokens are trained."""
        ids = dataset.prompt_ids(row)
        return [Supervised("prompt", ids, np.zeros(len(ids), bool))]

    @classmethod
    def supervision(cls, config: Config, path: str, row: int) -> Supervision:
        """What the job trains on of a row of a file. For a process without MPI, torch or a model."""
        from hpcrl.data.images import ImageProcessor
        from hpcrl.model.families.config_json import read_shape

        job = cls(cast("World", None), config, None, argparse.Namespace())
        tokenizer, folder = tokenizer_of(config.model), config.model.path
        vision = None if folder is None else read_shape(Path(folder)).vision
        images = None if vision is None else ImageProcessor.of_model(str(folder), vision, config.data)
        dataset = job.read_rows([path], tokenizer, images=images, only=row)
        return Supervision(dataset.where(0), job.supervised(dataset, 0), tokenizer, images)

    def all_roles(self) -> list[RoleSpec]:
        """`roles()`, with those of `own_roles` added or in place of built-in roles of the same name."""
        return with_own(self.roles(), self.own_specs())

    @property
    def command(self) -> list[str]:
        """The words after `hpcrl` that started the job."""
        name = [self.name] if self.file is None else ["run", self.file]
        given = vars(self.arguments)  # none where Python code made the job
        return [*name, *([given["config"]] if "config" in given else []), *given.get("overrides", ())]

    @property
    def num_rows(self) -> dict[str, dict[str, int]]:
        """train and val -> data file -> its rows that were read."""
        inputs, data = self.inputs, self.config.data
        read: dict[str, Any] = {**inputs.prompts, **inputs.sequences, **inputs.pairs}
        files = {"train": data.train_files, "val": data.val_files}
        return {
            split: dict(zip(files[split], read[split].file_sizes, strict=False)) for split in files if split in read
        }

    def steps_for_epochs(self, num_rows: int, epochs: int) -> int:
        """Steps of the run with so many passes over the training data, of which `start` has taken a part."""
        rows_done = self.start.consumed_rows(self.rows_per_step)
        return steps_for_epochs(num_rows, self.rows_per_step, epochs, steps_done=self.start.step, rows_done=rows_done)

    def main(self) -> int:
        from hpcrl.run.recovery import open_memory, recover
        from hpcrl.run.run import Run
        from hpcrl.run.start import check_scratch, check_time, find_start
        from hpcrl.workers.team import build_team

        world, config = self.world, self.config
        for line in self.former_members:
            log.warning("%s; the former name is read until the next release", line)
        check_scratch(world, config)
        recover(world, config)
        self.inputs = world.run_collectively(self.read_inputs)
        models = self.models
        self.inputs.shapes |= world.run_collectively(models.own_shapes)
        start: Start = find_start(
            world, config, models.needs_start_weights, models.frozen(), self.trained_role, self.name
        )
        self.saved_state.set_start(start)
        total = self.total_steps()
        check_time(world, config, start, 0 if start.state.get("reached") else total)
        team = build_team(world, config, self.derived, self.inputs, self.all_roles(), total)
        world = self.world = replace(world, node_memory=open_memory(world, config))

        def program(controller: Controller) -> int:
            return Run(world, controller, self, start, total).until_done(self.loop)

        code: int = world.broadcast_object(self.run_program(team, program, self._trace(start.step + 1)))
        if world.node_memory is not None:
            world.node_memory.keeps = code not in (DONE, REQUEUE)  # the last save has failed
        return code

    def _trace(self, first_step: int) -> RankTrace | None:
        from hpcrl.observe.trace.rank_trace import RankTrace
        from hpcrl.runtime.job import run_directory

        kept = self.config.trainer.trace_steps
        if kept == "none":
            return None
        every = 1 if kept == "all" else kept
        return RankTrace(run_directory(self.config), self.world.rank, first_step, every)


class SupervisedConfig(Section):
    batch_size: PositiveInt = Field(256, description="rows of data.train_files per optimizer step, over all ranks")
    max_token_len_per_gpu: PositiveInt = Field(16384, description="tokens per micro-batch of one model replica")
    total_epochs: PositiveInt = Field(1, description="passes over the training rows")
    total_training_steps: PositiveInt | None = Field(None, description="optimizer steps; null: by total_epochs")
    eval_freq: PositiveOrMinusOne = Field(-1, description="evaluate on data.val_files every N steps; -1: never")
    eval_samples: PositiveInt = Field(256, description="validation rows per evaluation")


class SupervisedModels(Models):
    def optimizer(self, spec: RoleSpec) -> OptimConfig | None:
        own: OptimConfig | None = getattr(self.job.own, "optim", None)
        return own if own is not None and spec.name == self.job.trained_role else super().optimizer(spec)


class SupervisedValidation(Validation):
    @property
    def freq(self) -> int:
        return int(self.job.own.eval_freq)


class SupervisedState(SavedState):
    """It has the position of the training rows' order."""

    def set_start(self, start: Start) -> None:
        super().set_start(start)
        if self.job.world.rank == 0:
            consumed = {"position": start.consumed_rows(self.job.rows_per_step)}
            self.job.order.load_state_dict(start.state.get("sampler", consumed))

    def position(self, step: int) -> dict[str, Any]:
        return {**super().position(step), "sampler": self.job.order.state_dict()}


class SupervisedJob(TrainingJob):
    """A job that trains on given answers. Its config section has the name of the job, and is a `SupervisedConfig`."""

    derived: RoleLayouts
    order: OrderedSampler  # of the training rows
    validation_class: ClassVar[type[Validation]] = SupervisedValidation
    models_class = SupervisedModels
    saved_state_class = SupervisedState

    def log_first_row(self, dataset: Any) -> None:
        """Log which tokens of the first training row are trained."""
        inputs = self.inputs
        Supervision(dataset.where(0), self.supervised(dataset, 0), inputs.tokenizer, inputs.images).log()

    @classmethod
    def check_data(cls, config: Config, columns: str) -> int:
        """Check steps, checkpoints and files; returns the longest sequence, in tokens.

        Args:
            columns: the columns that files hold.
        """
        freq = cls.section_of(config).eval_freq
        if config.trainer.total_training_steps is not None:  # it is meant, and would change nothing
            raise ConfigError(
                f"trainer.total_training_steps={config.trainer.total_training_steps} is for `hpcrl train`; "
                f"`hpcrl {cls.name}` reads {cls.name}.total_training_steps; set that"
            )
        check_checkpoints(config.trainer)
        if not config.data.train_files:
            raise ConfigError(f"data.train_files is empty; name at least one Parquet or JSONL file of {columns}")
        if freq > 0 and not config.data.val_files:
            raise ConfigError(
                f"{cls.name}.eval_freq={freq} evaluates, and data.val_files is empty; name files or use -1"
            )
        return check_lengths(config)

    def order_rows(self, file_sizes: Sequence[int]) -> None:
        """Order the training rows, of which each file of data.train_files has so many."""
        self.order = file_order(file_sizes, self.config.data, self.config.run.seed)

    def total_steps(self) -> int:
        own = self.own
        return own.total_training_steps or self.steps_for_epochs(self.order.num_rows, own.total_epochs)

    @property
    def rows_per_step(self) -> int:  # type: ignore[override]
        return int(self.own.batch_size)

    def load_ahead(self, run: Run, batch_of: Callable[[np.ndarray], DataProto]) -> None:
        """Have the pictures of the next step decoded in processes, meanwhile.

        Args:
            batch_of: returns what the data worker loads, given the rows.
        """
        if self.config.data.image_workers > 0:
            run.controller["data"].load_ahead(batch_of(self.order.rows_ahead(self.rows_per_step)))

    def next_rows(self, run: Run, lengths: np.ndarray) -> np.ndarray:
        """The rows of the data that the next step trains on, int64.

        Args:
            lengths: tokens of every row, int64.
        """
        rows, epochs = self.order.next_rows(self.rows_per_step)
        run.log({EPOCH: float(epochs[0]), TOTAL_NUM_TOKENS: float(np.sum(lengths[rows]))})
        return rows
