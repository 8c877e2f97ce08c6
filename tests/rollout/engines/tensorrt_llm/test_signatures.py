"""The self-test against stand-ins: that it sees what differs. What the real package has, nobody has seen."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hpcrl.rollout.engines.tensorrt_llm import signatures
from hpcrl.rollout.engines.tensorrt_llm.signatures import compared
from hpcrl.runtime.exits import InputError
from tests.rollout.engines.tensorrt_llm.standins import StandIn


@pytest.fixture
def package(standin: Callable[..., StandIn]) -> StandIn:
    return standin({"model.norm.weight": torch.zeros(2)})


def test_a_package_as_expected_passes(package: StandIn) -> None:
    signatures.self_test(importlib.import_module)
    lines = compared(importlib.import_module)
    assert len(lines) == 1 + len(signatures.TABLE) and not any(line.wrong for line in lines)


def test_another_version_is_told(package: StandIn) -> None:
    package.modules["tensorrt_llm"].__version__ = "1.3.0rc21"  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"tensorrt-llm 1.3.0rc21 found, 1.2.1 expected"):
        signatures.self_test(importlib.import_module)
    assert [line.name for line in compared(importlib.import_module) if line.wrong] == ["TensorRT-LLM"]


def _needs_more(new_comm: Any, color: Any) -> None: ...


class _Older:
    def __init__(self, engine: Any, executor_config: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("module", "attribute", "value", "line"),
    [
        ("tensorrt_llm._utils", "set_mpi_comm", None, "set_mpi_comm does not exist"),
        ("tensorrt_llm._utils", "set_mpi_comm", _needs_more, "missing a required argument: 'color'"),
        ("tensorrt_llm.executor.worker", "GenerationExecutorWorker", _Older, "unexpected keyword"),
        (signatures.ARGS, "KvCacheConfig", types.SimpleNamespace(model_fields={"max_tokens": 0}), "has no field"),
    ],
)
def test_what_differs_is_one_line(
    package: StandIn, monkeypatch: pytest.MonkeyPatch, module: str, attribute: str, value: Any, line: str
) -> None:
    if value is None:
        monkeypatch.delattr(package.modules[module], attribute)
    else:
        monkeypatch.setattr(package.modules[module], attribute, value)
    with pytest.raises(InputError) as caught:
        signatures.self_test(importlib.import_module)
    assert attribute in str(caught.value) and "\n" not in str(caught.value)
    wrong = [found for found in compared(importlib.import_module) if found.wrong]
    assert any(line in f"{found.name} {found.wrong}" for found in wrong)


def test_a_missing_module_is_told(package: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Any:
        if name == signatures.EXECUTOR:
            raise ImportError("libnvinfer.so.10: cannot open shared object file")
        return importlib.import_module(name)

    with pytest.raises(InputError, match=r"control_action cannot be imported: libnvinfer.* and 1 more"):
        signatures.self_test(load)
