"""The stubs of tools/bench controller against the workers that they stand for."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import pytest

from hpcrl.config.roles import ACTOR, CRITIC, REF, REFIT, ROLLOUT, SCORER

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.mark.parametrize("spec", [ACTOR, REF, CRITIC, ROLLOUT, SCORER, REFIT], ids=lambda spec: spec.name)
def test_stubs_are_registered_as_the_workers(spec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    stub, worker = import_module("bench.controller").STUBS[spec.name], resolve_name(spec.worker)
    methods = [name for name, method in vars(stub).items() if hasattr(method, "registration")]
    assert methods
    for name in methods:
        assert getattr(stub, name).registration == getattr(worker, name).registration
