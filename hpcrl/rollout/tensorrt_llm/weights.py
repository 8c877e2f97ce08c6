"""The engine's parameters as the buffers that refit writes, once they are seen to be those that the plan means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from hpcrl.model.params import Shard


def buffers(named: Iterable[tuple[str, Tensor]], expected: Sequence[Shard], tp_rank: int) -> dict[str, Tensor]:
    """This rank's parameters by name, in the order of `expected`.

    Raises RuntimeError when one is missing, has another shape, or is there without being in the plan: it would keep
    the random values that the engine started with. Parameters that are neither weight nor bias are constants.
    """
    found = {name: parameter.detach() for name, parameter in named}
    wanted = {shard.local_name: shard for shard in expected}
    missing = [name for name in wanted if name not in found]
    surplus = [name for name in found if name not in wanted and name.endswith((".weight", ".bias"))]
    differ = [
        f"{name} {tuple(found[name].shape)}, {shard.local_shape} expected"
        for name, shard in wanted.items()
        if name in found and tuple(found[name].shape) != shard.local_shape
    ]
    if missing or surplus or differ:
        parts = (("missing", missing), ("unknown", surplus), ("of another shape", differ))
        told = "; ".join(f"{len(names)} {what}, such as {names[0]}" for what, names in parts if names)
        raise RuntimeError(f"TensorRT-LLM's parameters are not those of the refit plan on TP rank {tp_rank}: {told}")
    return {name: found[name] for name in wanted}
