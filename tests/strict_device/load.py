"""The strict device: `torch.device("strict", 0)`, after `load()`."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from hpcrl.runtime import platform

if TYPE_CHECKING:
    from hpcrl.runtime.world import World

SOURCE = Path(__file__).with_name("device.cpp")


class Counts(NamedTuple):
    """What the host had the device do: copies from and to the host and their bytes; waits for the device, of which a
    copy that blocks is one, and one from memory that is not pinned; and kernels, of which a view is none, and what the
    CPU's kernel calls inside is none either."""

    to_device: int
    bytes_to_device: int
    to_host: int
    bytes_to_host: int
    synchronisations: int
    launches: int

    @classmethod
    def now(cls) -> Counts:
        """Return the counts since the start of the process."""
        found = (ctypes.c_int64 * len(cls._fields))()
        _library().read_counts(found)
        return cls(*found)

    def since(self, before: Counts) -> Counts:
        return Counts(*(late - early for late, early in zip(self, before, strict=True)))


def load() -> torch.device:
    """Compile the device where the cache does not have it yet, 10 to 30 seconds, and register it with torch."""
    if not hasattr(torch, "strict"):
        torch.ops.load_library(_compiled())
        torch.utils.rename_privateuse1_backend("strict")
        _library().register_hooks()
        torch._register_device_module("strict", _module())
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=False)
    return torch.device("strict", 0)


def load_on_all_ranks(world: World) -> torch.device:
    """Rank 0 compiles it where the cache does not have it. Collective."""
    for its_turn in (world.rank == 0, world.rank > 0):
        if its_turn:
            load()
        world.barrier()
    return load()


@contextmanager
def in_place_of_cuda(device: torch.device) -> Iterator[None]:
    """Inside it the real code runs on `device`."""
    # MPI is for one thread, and on a device backward would run in another.
    with platform.in_place_of_cuda(device), torch.autograd.set_multithreading_enabled(False):
        yield


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(_compiled()))


def _compiled() -> Path:
    """The library of this source and this torch."""
    torch_folder = Path(torch.__file__).parent
    command = [
        *("c++", "-shared", "-fPIC", "-std=c++20", "-O1", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{torch_folder / 'include' / rest}" for rest in ("", "torch/csrc/api/include")),
        str(SOURCE),
        *(f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"),
    ]
    version = f"{SOURCE.read_text()} {torch.__version__} {command}"
    name = f"strict_device_{hashlib.sha256(version.encode()).hexdigest()[:16]}.so"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpcrl_tests"
    library = cache / name
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / name
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the strict device does not compile; it needs a C++ compiler\n{done.stderr}")
            made.replace(library)
    return library


def _module() -> types.ModuleType:
    """What torch asks of a device's module."""
    module = types.ModuleType("torch.strict")
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: _library().synchronise_device(),
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16],
    }
    vars(module).update(answers)
    return module
