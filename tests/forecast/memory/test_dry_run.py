"""The dry run: every rank says where it is, nobody imports torch, and a rank that disagrees is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.forecast.dry_run import Place, digest, disagreements, started_by_launcher
from hpcrl.runtime.layout import GROUP_DIMS, Layout

ROOT = Path(__file__).parents[3]
LAYOUTS = {"actor": Layout(tuple(range(8)), tp=2, pp=2), "critic": Layout((4, 5, 6, 7), tp=4)}


def places() -> list[Place]:
    def place(rank: int) -> Place:
        mine = {role: layout for role, layout in LAYOUTS.items() if rank in layout}
        groups = {
            (role, name): digest(layout.group_of(rank, *dims))
            for role, layout in mine.items()
            for name, dims in GROUP_DIMS.items()
        }
        return Place("n0", {role: layout.coord(rank) for role, layout in mine.items()}, groups, [], 0)

    return [place(rank) for rank in range(8)]


def test_ranks_that_agree() -> None:
    assert disagreements(LAYOUTS, places()) == []


def test_a_rank_that_disagrees_is_named() -> None:
    moved = places()
    moved[5].coords["critic"] = LAYOUTS["critic"].coord(6)
    assert any("rank 5 is critic" in line for line in disagreements(LAYOUTS, moved))
    other = places()
    other[6].groups["actor", "tp"] = digest((6, 5))
    assert disagreements(LAYOUTS, other) == ["wrong: actor's group tp of ranks (6, 7) is another one for ranks [6]"]
    heavy = places()
    heavy[3].imported.append("torch")
    assert disagreements(LAYOUTS, heavy) == ["wrong: rank 3 imported torch"]


def test_who_knows_how_many_ranks_were_started() -> None:
    assert started_by_launcher({}) is None
    assert started_by_launcher({"SLURM_STEP_NUM_TASKS": "8"}) == 8
    assert (
        started_by_launcher({"SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "8"}) == 8
    )  # mpiexec's proxies are Slurm's tasks
    assert started_by_launcher({"SLURM_STEP_NUM_TASKS": "2", "OMPI_COMM_WORLD_SIZE": "8"}) == 8


def dry_run(size: int, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    mpiexec = Path(sys.prefix) / "bin" / "mpiexec"
    return subprocess.run(
        [mpiexec, "-n", str(size), sys.executable, "-m", "hpcrl", *arguments],
        cwd=folder,
        env=os.environ | {"HPCRL_DRY_RUN": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_eight_ranks_without_torch(tmp_path: Path) -> None:
    ran = dry_run(8, "train", f"{ROOT}/configs/ppo_countdown_cpu.yaml", "placement.critic.pp=2", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "one world of 8 ranks on 1 node(s), 8 on each" in ran.stdout
    assert "all ranks agree on all coordinates and groups; none imported torch" in ran.stdout
    rows = {line.split()[0]: " ".join(line.split()) for line in ran.stdout.splitlines()}
    assert rows["critic"] == "critic tp 1 pp 2 dp 4 8 from 0 - 2 ranks, 1 node 4 ranks, 1 node"
    assert "rank 7 on" in ran.stdout and "critic tp 0 dp 3 pp 1" in ran.stdout
    assert "warning: data.train_files: data/countdown/train.parquet is not here" in ran.stdout
    assert list(tmp_path.iterdir()) == []  # nothing is written


def test_the_layout_of_a_search_runs_dry(tmp_path: Path) -> None:
    """Its file is a template like any other: `plan` finds that it fits, and 16 ranks agree on where they are."""
    command = [sys.executable, "-m", "hpcrl", "plan"]
    search = ["--search", f"{ROOT}/configs/grpo_8b.yaml", "--machine", "dgx_h100", "--nodes", "2", "--out", "best.yaml"]
    for arguments, said in ((search, "written               best.yaml"), (["best.yaml"], "it fits")):
        done = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0 and said in done.stdout, done.stderr
    ran = dry_run(16, "train", "best.yaml", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "all ranks agree on all coordinates and groups; none imported torch" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("train", "no.yaml"), "no such config file: no.yaml"),
        (("train", "{}/configs/ppo_countdown_cpu.yaml", "job.machine=dgx_h10"), "no machine dgx_h10"),
        (
            ("sft", "{}/configs/sft_countdown_cpu.yaml", "placement.actor.tp=2"),
            "placement.actor: tp*pp*cp=2*1*1=2 does",
        ),
    ],
)
def test_a_plan_that_cannot_run_gives_one_line(arguments: tuple[str, ...], line: str, tmp_path: Path) -> None:
    ran = dry_run(3, *(argument.format(ROOT) for argument in arguments), folder=tmp_path)
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"hpcrl: error: {line}") and ran.stderr.count("\n") == 1
