"""The world that start_mpi and start_torch make, on however many ranks this session has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hpcrl.launch.exits import InputError
from hpcrl.launch.world import World


def test_ranks_agree_with_torch(world: World) -> None:
    assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.size)
    assert world.local_size == world.size and world.local_rank == world.rank, "all ranks of a test are on one node"
    ranks = torch.tensor([world.rank])
    dist.all_reduce(ranks)
    assert ranks.item() == world.size * (world.size - 1) // 2


def test_threads_share_the_cores(world: World) -> None:
    assert torch.get_num_threads() == world.threads >= 1
    if os.environ["OMP_NUM_THREADS"] == str(world.threads):
        return
    assert world.threads * world.local_size <= max(world.local_size, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize("length", [0, 1, 100_000])
def test_broadcast_and_exchange_carry_any_object(world: World, length: int) -> None:
    root = world.size - 1
    mine = {"rank": world.rank, "blob": bytes(length)}
    assert world.broadcast(mine, root) == {"rank": root, "blob": bytes(length)}
    assert [said["rank"] for said in world.exchange(mine)] == list(range(world.size))
    assert world.exchange("x" * world.rank) == ["x" * rank for rank in range(world.size)]
    world.barrier()


def test_together_raises_the_lowest_ranks_user_error_everywhere(world: World) -> None:
    def check() -> int:
        if world.rank >= world.size - 2:
            raise InputError(f"rank {world.rank} found no file")
        return world.rank

    with pytest.raises(InputError, match=f"rank {max(0, world.size - 2)} found no file") as caught:
        world.together(check)
    assert caught.value.everywhere


def test_together_returns_each_ranks_result(world: World) -> None:
    assert world.together(lambda: world.rank * 2) == world.rank * 2


def test_tmp_path_is_one_folder_for_all(world: World, world_tmp_path: Path) -> None:
    (world_tmp_path / str(world.rank)).touch()
    world.barrier()
    assert len(list(world_tmp_path.iterdir())) == world.size


@pytest.mark.world(2)
def test_marked_for_two_ranks_runs_on_two(world: World) -> None:
    assert world.size == 2
