"""What the machine has: packages, chips, shared memory."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path

import torch

from hpcrl.engine.refit.transports import nodes_of
from hpcrl.machine.facts import gpu_driver
from hpcrl.runtime.launcher import library_name
from hpcrl.runtime.world import World
from tools.gpu.outcome import Failed, print_head, print_row, require

PACKAGES = (
    *("megatron-core", "mpi4py", "numpy", "pydantic", "transformers", "triton", "safetensors", "h5py", "pyarrow"),
    *("tensorboard", "tokenizers", "pyyaml", "jinja2", "tqdm", "msgpack", "xxhash", "einops", "psutil"),
)
TEST_PACKAGES = ("pytest", "pytest-xdist", "hypothesis")
OPTIONAL = ("matplotlib", "peft", "transformer-engine", "flash-attn", "tensorrt-llm")
MODULES = (
    *("hpcrl.jobs.train", "hpcrl.engine.engine", "hpcrl.rollout.engines.native.engine", "hpcrl.engine.refit.refit"),
    *("hpcrl.kernels.decode_attention", "hpcrl.engine.checkpoint.manifest", "hpcrl.observe.record.writer"),
)
NETWORK = ("NCCL_", "FI_", "MPICH_", "UCX_", "OMPI_MCA_", "GLOO_")


def versions(world: World) -> str:
    """All that hpcrl imports can be imported; which versions there are."""
    return described(world, PACKAGES, MODULES)


def versions_with_tests(world: World) -> str:
    """The same, with what the tests import."""
    return described(world, (*PACKAGES, *TEST_PACKAGES), (*MODULES, "tests.mpi.lab"))


def job(world: World) -> str:
    """Versions, and what the job's nodes have, without their names."""
    ranks = world.all_gather_object((nodes_of(world.comm)[world.rank], chips(world), gpu_driver() or "-", adapters()))
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(NETWORK)]
    print_head(world, "node", "ranks", "of each", "driver", "network adapters")
    for number, ((_, *cells), count) in enumerate(Counter(ranks).items()):
        print_row(world, number, count, *cells)
    print_head(world, "variables of the network")
    print_row(world, " ".join(variables) or "none")
    return described(world, (*PACKAGES, "pytest"), (*MODULES, "tests.mpi.layouts"))


def chips(world: World) -> str:
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def adapters() -> str:
    """InfiniBand's ports by their rate, and Slingshot's interfaces."""
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*/rate"))
    kinds = [path.read_text().strip() for path in ports]
    kinds += ["Slingshot" for _ in Path("/sys/class/net").glob("hsn*")]
    return ", ".join(f"{count} x {kind}" for kind, count in Counter(kinds).items()) or "-"


def described(world: World, packages: tuple[str, ...], modules: tuple[str, ...]) -> str:
    versions, missing = [], []
    for name in (*packages, *OPTIONAL):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            if name in packages:
                missing.append(name)
    require(not missing, f"not installed: {', '.join(missing)}")
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise Failed(f"{module} cannot be imported: {error}") from error
    from mpi4py import MPI

    parts = [f"Python {sys.version.split()[0]}", f"torch {torch.__version__}", library_name(MPI.Get_library_version())]
    if world.device.type == "cuda":
        chip = torch.cuda.get_device_properties(world.device)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        gib = chip.total_memory / 2**30
        parts.append(
            f"{torch.cuda.device_count()} x {chip.name} of {gib:.0f} GiB, CUDA {torch.version.cuda}, NCCL {nccl}"
        )
    parts.append(f"/dev/shm {shutil.disk_usage('/dev/shm').free / 2**30:.1f} GiB free")
    return ", ".join([*parts, *versions])
