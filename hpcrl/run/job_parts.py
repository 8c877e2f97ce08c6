"""The parts of a training job: what its steps report, how it validates, its models, its state in checkpoints.

A job that needs another part names a subclass of it: `report_class = MyReport`. Loops are in the job itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpcrl.config.roles import EXPORT, RoleSpec
from hpcrl.config.schema import OptimConfig
from hpcrl.model.architecture import check_longest

if TYPE_CHECKING:
    from hpcrl.model.shape import ModelShape
    from hpcrl.run.job import TrainingJob
    from hpcrl.run.run import Run
    from hpcrl.run.start import Start


EPOCH, TOTAL_NUM_TOKENS = "training/epoch", "perf/total_num_tokens"  # metrics of each step that `Run` reads


class Part:
    """A part of `job`."""

    job: Any

    def __init__(self, job: TrainingJob) -> None:
        self.job = job

    def set_up(self, run: Run) -> None:
        """Make what the part uses, on rank 0, after the job's own `set_up`."""


class Report(Part):
    """What a step reports: numbers of the progress line, and metrics."""

    shown: Mapping[str, str] = {}  # name in the progress line -> metric, shown where a step has it
    phases_per_token: Sequence[str] = ()  # whose time is also logged per token

    @property
    def label(self) -> str:
        """The first word of the progress line."""
        return str(self.job.name)

    def progress(self, metrics: dict[str, float]) -> dict[str, float]:
        """The numbers of the progress line."""
        return {name: metrics[key] for name, key in self.shown.items() if key in metrics}

    def step_metrics(
        self, run: Run, seconds: dict[str, float], lengths: list[int], num_response_tokens: int
    ) -> dict[str, float]:
        """Further metrics of a step; `seconds` are its timing_s/*, `lengths` the tokens of its samples."""
        return {}


class Validation(Part):
    """When a run validates, and how."""

    first: bool = False  # also before the first step

    @property
    def freq(self) -> int:
        """Steps between two validations; -1: never."""
        return -1

    def run(self, run: Run, step: int) -> tuple[dict[str, float], str]:
        """Metrics of the weights after `step`, and Markdown for TensorBoard."""
        raise NotImplementedError


class Models(Part):
    """The models of the job's roles: which are trained, saved, loaded and exported."""

    @property
    def saved(self) -> tuple[str, ...]:
        """Roles that checkpoints hold: the trained ones."""
        return tuple(spec.name for spec in self.job.all_roles() if spec.trains)

    @property
    def loaded(self) -> tuple[str, ...]:
        """Roles that begin with the weights of model.init_from: the trained ones, and the reference."""
        return (*self.saved, "ref") if self.needs_start_weights else self.saved

    @property
    def exported(self) -> list[RoleSpec]:
        """The role that writes the policy for other programs, if checkpoints hold it in that form."""
        config = self.job.config
        return [EXPORT] if config.trainer.save_hf or config.model.lora_rank > 0 else []

    @property
    def needs_start_weights(self) -> bool:
        """Whether a resumed run reads model.init_from again, for a reference."""
        return "ref" in self.job.derived.roles

    def frozen(self) -> dict[str, str]:
        """Role -> path of the weights of a model that is not trained."""
        frozen = [spec for spec in self.job.all_roles() if spec.head is not None and not spec.trains]
        return {spec.name: path for spec in frozen if (path := spec.init_from(self.job.config)) is not None}

    def optimizer(self, spec: RoleSpec) -> OptimConfig | None:
        """The optimizer of a role; None if it is not trained."""
        return getattr(spec.config_of(self.job.config), "optim", None) if spec.trains else None

    def stands_for(self, role: str) -> str:
        """The role whose workers are called for `role`: for "ref" the actor, where it is the actor without adapters."""
        return role

    def own_shapes(self) -> dict[str, ModelShape]:
        """Role -> shape, of roles of `own_roles` with a model of their own that `read_inputs` did not read."""
        from hpcrl.workers.team import shape_beside  # imports torch

        config, inputs = self.job.config, self.job.inputs
        shapes: dict[str, ModelShape] = {}
        for spec in self.job.own_specs():
            model = spec.architecture(config)
            if spec.head is not None and model is not config.model and spec.name not in inputs.shapes:
                shapes[spec.name] = shape_beside(model, inputs.shape)
                check_longest(shapes[spec.name], config, spec.path)
        return shapes


class SavedState(Part):
    """What a checkpoint's trainer.json holds of the job, as JSON."""

    def set_start(self, start: Start) -> None:
        """Set the start, on every rank, once the inputs are read."""
        self.job.start = start

    def position(self, step: int) -> dict[str, Any]:
        """How far the run is in its training data after `step`: the steps since the start have one size."""
        start, rows_per_step = self.job.start, self.job.rows_per_step
        return {"consumed_rows": start.consumed_rows(rows_per_step) + (step - start.step) * rows_per_step}

    def save(self, step: int) -> dict[str, Any]:
        """The rest of the state after `step`."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Load what `save` returned, on rank 0, after `set_up`."""
