"""Keeps out of a process what torch and megatron-core import and a run on the CPU never uses: a start is imports."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Context in which these modules cannot be imported, as if they were not installed; those that are loaded can."""
    kept_out = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(kept_out))  # type: ignore[arg-type]  # None: the import fails
    try:
        yield
    finally:
        for name in kept_out:
            sys.modules.pop(name, None)


@contextlib.contextmanager
def hollow(*names: str) -> Iterator[None]:
    """Context in which these modules are imported as ones whose every name is None; those that are loaded stay."""
    stand_ins = {name: _Hollow(name) for name in names if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, stand_in in stand_ins.items():
            del sys.modules[name]
            package, _, last = name.rpartition(".")
            if vars(sys.modules[package]).get(last) is stand_in:
                delattr(sys.modules[package], last)


class _Hollow(types.ModuleType):
    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def optimize_without_dynamo() -> None:
    """Torch's optimizers import its compiler, a second's work, to tell it what not to trace: needless where nothing is
    compiled. Call it before one of them is made."""
    for method in vars(torch.optim.Optimizer).values():
        if function := getattr(method, "__wrapped__", None):
            function.__dynamo_disable = function  # where torch._disable_dynamo looks first
    for optimizer in (torch.optim.Adam, torch.optim.SGD):
        if step := getattr(optimizer.step, "__wrapped__", None):
            optimizer.step = _step_without_dynamo(step)  # type: ignore[method-assign]


def _step_without_dynamo(step: Callable[..., Any]) -> Callable[..., Any]:
    """As torch's `_use_grad_for_differentiable`, without the breaks of a graph that is not being made."""

    @functools.wraps(step)
    def without_dynamo(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return step(optimizer, *args, **kwargs)

    return without_dynamo
