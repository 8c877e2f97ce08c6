from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from hpcrl.rollout.engines.tensorrt_llm import declaration
from tests.rollout.engines.tensorrt_llm.standins import StandIn


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, torch.Tensor]], StandIn]:
    """Installs a stand-in whose model has the given parameters; torch.cuda's calls go to its events."""

    def install(parameters: dict[str, torch.Tensor]) -> StandIn:
        made = StandIn(parameters)
        for name, module in made.modules.items():
            monkeypatch.setitem(sys.modules, name, module)

        def note(name: str) -> Callable[..., None]:
            return lambda *args: made.events.append(" ".join([name, *map(str, args)]))

        for name in ("synchronize", "empty_cache", "set_device", "set_per_process_memory_fraction"):
            monkeypatch.setattr(torch.cuda, name, note(name))
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.8, raising=False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        monkeypatch.setattr(declaration, "missing_package", lambda: None)
        return made

    return install
