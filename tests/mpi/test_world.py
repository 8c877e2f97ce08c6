"""The world that start_mpi and start_torch make, on however many ranks this session has."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hpcrl.runtime.exits import InputError
from hpcrl.runtime.gpus import rank_threads
from hpcrl.runtime.mpi import all_gather_object, create_group, duplicate, wait, wait_all
from hpcrl.runtime.world import World


def test_ranks_agree_with_torch(world: World) -> None:
    assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.size)
    assert world.local_size == world.size and world.local_rank == world.rank, "all ranks of a test are on one node"
    ranks = torch.tensor([world.rank])
    dist.all_reduce(ranks)
    assert ranks.item() == world.size * (world.size - 1) // 2


def test_threads_share_the_cores(world: World) -> None:
    assert torch.get_num_threads() == world.threads == int(os.environ["OMP_NUM_THREADS"])
    unset = {
        name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK")
    }
    for cores in (1, 2, 3, 8, 96):
        threads = rank_threads(unset, cores, world.local_size)
        assert threads >= 1
        assert threads * world.local_size <= max(world.local_size, cores) < (threads + 1) * world.local_size


def test_a_duplicate_keeps_its_messages_to_itself(world: World) -> None:
    r, n = world.rank, world.size
    copy = duplicate(world.comm)
    assert (copy.rank, copy.size) == (r, n)
    sent = [comm.Isend(np.array([value]), dest=(r + 1) % n) for comm, value in ((world.comm, 1), (copy, 2))]
    for comm, value in ((copy, 2), (world.comm, 1)):
        got = np.zeros(1, int)
        wait(comm.Irecv(got, source=(r - 1) % n))
        assert got[0] == value
    wait_all(sent)
    copy.Free()


def test_groups_have_their_own_order_and_overlap(world: World) -> None:
    """Every pair of neighbours, the higher rank first; the last to come is waited for."""
    r, n = world.rank, world.size
    for low in range(n - 1):
        if r in (low, low + 1):
            time.sleep(0.05 * (r == low))
            comm = create_group(world.comm, (low + 1, low))
            assert all_gather_object(comm, r) == [low + 1, low]
            comm.Free()
    backwards = create_group(world.comm, range(n - 1, -1, -1))
    assert backwards.rank == n - 1 - r and all_gather_object(backwards, r) == list(range(n - 1, -1, -1))
    backwards.Free()


@pytest.mark.parametrize("length", [0, 1, 100_000])
def test_broadcast_and_exchange_carry_any_object(world: World, length: int) -> None:
    root = world.size - 1
    mine = {"rank": world.rank, "blob": bytes(length)}
    assert world.broadcast_object(mine, root) == {"rank": root, "blob": bytes(length)}
    assert [said["rank"] for said in world.all_gather_object(mine)] == list(range(world.size))
    assert world.all_gather_object("x" * world.rank) == ["x" * rank for rank in range(world.size)]
    world.barrier()


def test_together_raises_the_lowest_ranks_user_error_everywhere(world: World) -> None:
    def check() -> int:
        if world.rank >= world.size - 2:
            raise InputError(f"rank {world.rank} found no file")
        return world.rank

    with pytest.raises(InputError, match=f"rank {max(0, world.size - 2)} found no file") as caught:
        world.run_collectively(check)
    assert caught.value.everywhere


def test_together_returns_each_ranks_result(world: World) -> None:
    assert world.run_collectively(lambda: world.rank * 2) == world.rank * 2


def test_tmp_path_is_one_folder_for_all(world: World, world_tmp_path: Path) -> None:
    (world_tmp_path / str(world.rank)).touch()
    world.barrier()
    assert len(list(world_tmp_path.iterdir())) == world.size


@pytest.mark.world(2)
def test_marked_for_two_ranks_runs_on_two(world: World) -> None:
    assert world.size == 2
