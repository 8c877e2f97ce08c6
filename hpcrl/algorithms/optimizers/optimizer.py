"""Optimizers by name, as the YAML names them: what one declares, and the whole matrices that it may compute on.

    @register_optimizer("lion", params=LionParameters)
    class Lion(Optimizer):
        def state(self, *, is_matrix): ...
        def step(self, groups, state, matrices): ...

The parameters are a dataclass, as of algorithms (`hpcrl.algorithms.parameters`).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar

from hpcrl.algorithms.parameters import NoParameters, Registry, parameters_of, torch

if TYPE_CHECKING:
    from torch import Tensor

Groups: TypeAlias = "Sequence[dict[str, Any]]"  # torch's parameter groups
States: TypeAlias = "MutableMapping[Tensor, dict[str, Tensor]]"  # weight -> name -> tensor


class WholeMatrices(Protocol):
    """The matrices of the model's layers, of which each rank holds ranges of elements."""

    def __contains__(self, weight: object) -> bool:
        """Whether a weight of the optimizer is a range of a matrix of a layer."""

    def apply(
        self, function: Callable[[Tensor], Tensor], ranges: MutableMapping[Tensor, Tensor]
    ) -> dict[Tensor, Tensor]:
        """Return the ranges of function(matrix) by weight, of the matrices that `ranges` are parts of.

        The function gets each projection as the Hugging Face file has it, (out, in) fp32, and returns a tensor of the
        same shape. Collective.

        Args:
            ranges: an fp32 tensor for each weight that is in this collection, of the weight's shape; they are removed.
        """


class Optimizer:
    """An optimizer of a config section `optim`.

    Weights, gradients and steps are fp32; parameter groups have `lr` and `weight_decay` of the step. `step` or `make`
    is what an optimizer defines at least.
    """

    is_sharded: ClassVar[bool] = True  # state is divided over replicas (ZeRO-1); False: each replica has all of it
    without_adapters: ClassVar[str] = ""  # why low-rank adapters cannot be trained with it; "": they can

    def __init__(self, params: Any = None) -> None:
        """Keep the parameters as `params`.

        Args:
            params: an instance of the optimizer's parameter dataclass.
        """
        self.params = params

    def state(self, *, is_matrix: bool) -> dict[str, str]:
        """Return the tensors that are kept for a weight, of its shape: name -> "float32" or "bfloat16".

        The state of a sharded optimizer also has "step", () fp32, the number of steps; an optimizer that reads it adds
        1 in each step, for all weights.

        Args:
            is_matrix: whether the weight is a matrix of a layer; false for all if the optimizer is not sharded.
        """
        raise NotImplementedError(f"{type(self).__name__} has no state(is_matrix)")

    def step(self, groups: Groups, state: States, matrices: WholeMatrices) -> None:
        """Update the weights of all groups in place, by their `grad`.

        A sharded optimizer gets the ranges of elements that this rank updates, (n,) each.

        Args:
            state: as declared, zeros before the first step.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step(groups, state, matrices)")

    def make(self, groups: Groups, matrices: WholeMatrices) -> torch.optim.Optimizer:
        """Return torch's optimizer over the groups, which calls `step`."""
        return _with_step(groups, partial(self.step, matrices=matrices))

    def operations(self, rows: int, cols: int) -> float:
        """Return the floating-point operations of the function that `WholeMatrices.apply` calls, for a projection of
        this size; 0 for an optimizer that does not call it."""
        return 0.0


def _with_step(groups: Groups, step: Callable[[Groups, States], None]) -> torch.optim.Optimizer:
    class WithStep(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
            step(self.param_groups, self.state)

    return WithStep(groups, {})


class OptimizerEntry(NamedTuple):
    """A registered optimizer."""

    name: str
    function: type[Optimizer]
    params: type  # its parameter dataclass

    @property
    def is_built_in(self) -> bool:
        return self.function.__module__.startswith("hpcrl.")


def _built_in() -> list[str]:
    folder = __name__.rpartition(".")[0]
    names = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return [f"{folder}.{name}" for name in names if f"{folder}.{name}" != __name__]


OPTIMIZERS: Registry[OptimizerEntry] = Registry("optimizer", *_built_in())
Class = TypeVar("Class", bound="type[Optimizer]")


def register_optimizer(name: str, params: type = NoParameters) -> Callable[[Class], Class]:
    """Make `optim.optimizer=<name>` use the decorated class.

    Args:
        params: a frozen dataclass (see `hpcrl.algorithms.parameters`). Its keys are `optim.<name>.<field>` in any
            section that has `optim`; fields that it inherits from a built-in optimizer's dataclass have the values of
            `optim`.
    """

    def register(optimizer: Class) -> Class:
        parameters_of(params)
        OPTIMIZERS.add(name, OptimizerEntry(name, optimizer, params))
        return optimizer

    return register


def built_in_parameters() -> tuple[type, ...]:
    """Return the parameter dataclasses of the optimizers in this folder, whose fields are keys of `optim`."""
    found = [entry.params for entry in OPTIMIZERS.entries().values() if entry.is_built_in]
    return tuple(dict.fromkeys(params for params in found if params is not NoParameters))
