"""What is asked of CUDA: fakes take the arguments of the real functions, and nothing is asked on the CPU."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch.profiler import profile

from hpcrl.runtime import accelerator
from hpcrl.runtime.accelerator import annotated
from hpcrl.runtime.exits import InputError

CUDA = torch.device("cuda")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Calls of the functions that are there on GPUs only."""
    calls: list[tuple] = []

    def fake(module: object, name: str) -> None:
        signature = inspect.signature(getattr(module, name))

        def call(*args: object, **kwargs: object) -> None:
            signature.bind(*args, **kwargs)
            calls.append((name, *args, *kwargs.items()))

        monkeypatch.setattr(module, name, call)

    for name in ("_record_memory_history", "_dump_snapshot"):
        fake(torch.cuda.memory, name)
    for name in ("range_push", "range_pop"):
        fake(torch.cuda.nvtx, name)
    return calls


def test_ranges_are_nvtx_on_cuda_and_the_profilers_while_it_records(
    asked: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    with annotated("not seen"):
        pass
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(KeyError), annotated("actor.update_actor"), annotated("forward-compute"):
        raise KeyError
    with profile() as recorded:
        with annotated("decode"):
            torch.ones(1)
    pushes = [("range_push", "actor.update_actor"), ("range_push", "forward-compute")]
    assert asked == [*pushes, ("range_pop",), ("range_pop",)]
    assert "decode" in [event.name for event in recorded.events()]


def test_memory_history_is_recorded_and_written_on_gpus_alone(
    asked: list[tuple], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    accelerator.record_memory_history(torch.device("cpu"))
    assert not accelerator.dump_memory_history(tmp_path / "oom.pickle") and asked == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(InputError, match="found cudaMallocAsync"):
        accelerator.record_memory_history(CUDA)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    accelerator.record_memory_history(CUDA)
    assert accelerator.dump_memory_history(tmp_path / "oom.pickle")
    assert asked == [
        ("_record_memory_history", ("max_entries", 100_000), ("stacks", "python")),
        ("_dump_snapshot", str(tmp_path / "oom.pickle")),
    ]


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"), True),
        (torch.distributed.DistBackendError("NCCL error:\nLast error:\nCuda failure 2 'out of memory'"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (MemoryError("out of memory"), False),
    ],
)
def test_out_of_memory_is_what_torch_cuda_and_nccl_call_so(error: BaseException, is_it: bool) -> None:
    assert accelerator.is_out_of_memory(error) == is_it
