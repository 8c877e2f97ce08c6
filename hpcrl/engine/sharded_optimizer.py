"""Megatron's distributed optimizer over an optimizer of `hpcrl.algorithms.optimizers`, and its part of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from hpcrl.algorithms.optimizers.adamw import fused_adam
from hpcrl.engine.matrix_updates import Place
from hpcrl.engine.model_state import sharded_parts

if TYPE_CHECKING:
    from hpcrl.algorithms.optimizers.optimizer import Optimizer, WholeMatrices

States = Mapping[torch.Tensor, Mapping[str, torch.dtype]]  # weight -> name of a tensor of its state -> dtype


class ShardedOptimizer(DistributedOptimizer):
    """Megatron's distributed optimizer, whose state has the names and dtypes that the optimizer declares, and a step
    counter that is a tensor per parameter.

    Megatron accepts Adam only. It gets one without state, divides its parameters, and `use` replaces it.

    Megatron 0.16 expects a tensor named "step" in a reshardable checkpoint, which it does not write there, and loads
    one tensor into all parameters, with which torch would count each step once per parameter.

    Megatron gathers the reshardable form whole on every replica, and one of them writes it. Here each replica writes
    its own part, under the same names.
    """

    optimizer: torch.optim.Optimizer

    def __init__(self, param_groups: list[dict[str, Any]], *arguments: Any, **options: Any) -> None:
        """Set up megatron's optimizer.

        Args:
            arguments, options: those of megatron's class, after its optimizer.
        """
        self._groups = param_groups
        self._states: dict[torch.Tensor, dict[str, torch.dtype]] = {}  # by parameter of the model
        super().__init__(torch.optim.AdamW([dict(group) for group in param_groups]), *arguments, **options)

    def use(self, chosen: Optimizer, matrices: WholeMatrices, is_matrix: Mapping[torch.Tensor, bool]) -> None:
        """Make torch's optimizer over the ranges of this rank, and its state.

        Args:
            is_matrix: for each parameter of the model, whether it is a matrix of a layer.
        """
        for parameter, of_layer in is_matrix.items():
            self._states[parameter] = dtypes_of(chosen, is_matrix=of_layer)
        divided = [group["params"] for group in self.optimizer.param_groups]
        self.optimizer = chosen.make(self._groups, matrices)
        # As megatron does: torch takes no views of parameters when an optimizer is made.
        for group, params in zip(self.optimizer.param_groups, divided, strict=True):
            group["params"] = params
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        # Torch's optimizers make their state at the first step; megatron cannot save or load before that.
        init_state(self.optimizer, dict(self._ranges()), counts=not _counts_steps(self.optimizer))

    def main_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the range of the fp32 weights of a model's parameter that this rank updates; None if it has none."""
        place = self.model_param_group_index_map.get(parameter)
        return None if place is None else self.optimizer.param_groups[place[0]]["params"][place[1]]

    def places(self) -> Iterator[tuple[torch.Tensor, Place]]:
        """Yield the parameters of the model, and where they are in buckets."""
        for buffer in self.buffers:
            for parameter, (start, _, number) in buffer.param_index_map.items():
                bucket = buffer.buckets[number]
                yield parameter, Place(start - bucket.offset, bucket.grad_data.numel())

    def _ranges(self) -> Iterator[tuple[torch.Tensor, Mapping[str, torch.dtype]]]:
        for parameter in self.model_param_group_index_map:
            main = self.main_of(parameter)
            assert main is not None
            yield main, self._states[parameter]

    def sharded_param_state_fully_reshardable(
        self, model_sharded_state_dict: dict[str, Any], is_loading: bool = False, metadata: dict[str, Any] | None = None
    ) -> dict[Any, Any]:
        entries = {entry.data: entry for entry in model_sharded_state_dict.values()}
        return self._requested(entries) if is_loading else self._written(entries)

    def _written(self, entries: Mapping[torch.Tensor, ShardedTensor | ShardedTensorFactory]) -> dict[Any, Any]:
        """Return this rank's ranges of weights and state, as boxes."""
        state: dict[int, ShardedTensor] = {}
        for buckets_of_dtype in self.gbuf_ranges:
            for bucket in (bucket for buckets in buckets_of_dtype.values() for bucket in buckets):
                for parameter, ranges in bucket["param_map"].items():
                    own, entry = ranges["param"], entries[parameter]
                    tensors = self._get_main_param_and_optimizer_states(parameter)
                    for kind in ("param", *self._states[parameter]):
                        key, flat = _key(kind, entry), tensors[kind].detach().view(-1)
                        assert flat.numel() == own.end - own.start
                        for part in sharded_parts(entry, key, flat, own.start):
                            state[len(state)] = part
        return state

    def _requested(self, entries: Mapping[torch.Tensor, ShardedTensor | ShardedTensorFactory]) -> dict[Any, Any]:
        """Return whole tensors in fp32 to load into, numbered as megatron expects: all parameters of its buffers."""
        state: dict[int, dict[str, Any]] = {}
        for parameter in (parameter for buffer in self.buffers for parameter in buffer.param_index_map):
            entry, tensors = entries[parameter], {}
            for kind in ("param", *self._states[parameter]):
                data = torch.empty(entry.data.shape, dtype=torch.float32, device="cpu")
                dtype = {} if isinstance(entry, ShardedTensorFactory) else {"dtype": data.dtype}
                tensors[kind] = replace(entry, key=_key(kind, entry), data=data, **dtype)
            state[len(state)] = tensors
        return state

    def _set_main_param_and_optimizer_states(self, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        steps = {"step": state["step"]} if "step" in state else {}
        super()._set_main_param_and_optimizer_states(model_param, tensors | steps)

    def state_dict(self) -> dict[str, Any]:
        """Add the step counter, which megatron reads from torch's Adam only without Apex and Transformer Engine."""
        found = super().state_dict()
        steps = {float(state["step"]) for state in self.optimizer.state.values() if "step" in state}
        if steps:
            (step,) = steps
            for group in found["optimizer"]["param_groups"]:
                group["step"] = step
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the dtypes of the state, which torch converts to that of the weights."""
        super().load_state_dict(state_dict)
        dtypes = dict(self._ranges())
        for main, state in self.optimizer.state.items():
            for name, dtype in dtypes[main].items():
                state[name] = state[name].to(dtype)
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = torch.full_like(state["step"], state_dict["optimizer"]["param_groups"][0]["step"])


def _key(kind: str, entry: ShardedTensor | ShardedTensorFactory) -> str:
    return f"optimizer.state.{kind}.{entry.key}"


def _counts_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is Apex's fused Adam, which counts steps in its groups."""
    fused = fused_adam()
    return fused is not None and isinstance(optimizer, fused)


def dtypes_of(chosen: Optimizer, *, is_matrix: bool) -> dict[str, torch.dtype]:
    return {name: getattr(torch, dtype) for name, dtype in chosen.state(is_matrix=is_matrix).items()}


def init_state(optimizer: torch.optim.Optimizer, states: States, *, counts: bool) -> None:
    """Make the state that is not there yet, zeros; with `counts`, a step counter for each weight."""
    for weight, dtypes in states.items():
        state = optimizer.state[weight]
        if not state:
            if counts:
                state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            for name, dtype in dtypes.items():
                state[name] = torch.zeros_like(weight.data, dtype=dtype)
