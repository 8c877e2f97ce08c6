"""A stub of Cray MPICH with MPICH_GPU_SUPPORT_ENABLED: the start ends in one line before MPI_Init, or warns."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.runtime.conftest import MPIEXEC, Ended

# As Cray MPICH: its name, and MPI_Init_thread that aborts if GPU support is requested and no GTL library is loaded.
CRAY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int MPI_Get_library_version(char *text, int *length) {
    *length = sprintf(text, "MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)\n");
    return 0;
}

int MPI_Init_thread(int *argc, char ***argv, int required, int *provided) {
    const char *asked = getenv("MPICH_GPU_SUPPORT_ENABLED");
    if (asked && !strcmp(asked, "1") && !dlsym(RTLD_DEFAULT, "gtl_of_a_test")) {
        fprintf(stderr, "MPIDI_CRAY_init: GPU_SUPPORT_ENABLED is requested, but GTL library is not linked\n");
        exit(255);
    }
    void *library = dlopen("libmpi.so.12", RTLD_LAZY | RTLD_NOLOAD);
    int (*init)(int *, char ***, int, int *) = dlsym(library, "MPI_Init_thread");
    return init(argc, argv, required, provided);
}
"""
GTL = "int gtl_of_a_test;"
START = """
from hpcrl.runtime import exits, world
try:
    comm = world.start_mpi()
except exits.InputError as error:
    exits.exit_with_error(error)
print("rank", comm.rank, "has started", flush=True)
world.finish(0)
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("libraries")
    for name, code in (("libmpi_cray.so", CRAY), ("libmpi_gtl_cuda.so", GTL)):
        command = ["gcc", "-shared", "-fPIC", "-o", str(folder / name), "-x", "c", "-"]
        subprocess.run(command, input=code, text=True, check=True)
    return {"cray": f"{folder}/libmpi_cray.so", "gtl": f"{folder}/libmpi_cray.so {folder}/libmpi_gtl_cuda.so"}


@pytest.fixture
def launch(run: Callable[..., Ended], libraries: dict[str, str]) -> Callable[..., Ended]:
    return lambda code, preloaded, enabled: run(
        *(MPIEXEC, "-n", "2", sys.executable, "-c", code),
        LD_PRELOAD=libraries[preloaded],
        MPICH_GPU_SUPPORT_ENABLED=enabled,
    )


def test_gpu_support_without_its_library_is_one_line_before_mpi_init(launch: Callable[..., Ended]) -> None:
    assert "GTL library is not linked" in launch("from mpi4py import MPI", "cray", "1").stderr, "it aborts, as Cray's"
    ended = launch(START, "cray", "1")
    (line,) = [line for line in ended.stderr.splitlines() if "hpcrl" in line]
    assert ended.code == 2 and "rank" not in ended.stdout and "MPIDI_CRAY_init" not in ended.stderr
    assert line.startswith("hpcrl: error: found MPICH_GPU_SUPPORT_ENABLED=1, ")
    assert line.endswith("`export MPICH_GPU_SUPPORT_ENABLED=0`"), "the line to add"
    fixed = launch(START, "cray", "0")
    assert fixed.code == 0 and fixed.stdout.count("has started") == 2 and "MPICH_GPU" not in fixed.stderr


def test_gpu_support_with_its_library_is_a_warning(launch: Callable[..., Ended]) -> None:
    ended = launch(START, "gtl", "1")
    assert ended.code == 0 and ended.stdout.count("has started") == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("hpcrl: warning: MPICH_GPU_SUPPORT_ENABLED=1: ") and "can deadlock" in line


def test_another_mpi_library_does_not_read_the_variable(run: Callable[..., Ended]) -> None:
    ended = run(MPIEXEC, "-n", "2", sys.executable, "-c", START, MPICH_GPU_SUPPORT_ENABLED="1")
    assert ended.code == 0 and ended.stdout.count("has started") == 2 and ended.stderr == ""
