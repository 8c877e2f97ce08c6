"""`hpcrl check --job` on two virtual nodes, in a step of Slurm, with what a site file expects of the fabric."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.preloaded import RANK
from tests.slurm.conftest import Lab
from tests.slurm.small_ppo import environment

SCRIPT = f"""\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --time=10 --output=job.out
export HPCRL_FABRIC_NET=IB HPCRL_FABRIC_ALL_REDUCE=0.000001 HPCRL_FABRIC_POINT_TO_POINT=100000
srun --mpi=pmi2 {shlex.join(RANK)} -m hpcrl check --job
"""


def test_the_fabric_of_an_allocation_is_measured(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "job.sbatch").write_text(SCRIPT)
    job = environment(lab, tmp_path).sbatch(["job.sbatch"], cwd=tmp_path)
    state, output = lab.wait(job), (tmp_path / "job.out").read_text()
    assert state == "COMPLETED" and "\nready\n" in output, output
    assert re.search(r"^  all-reduce +[\d.]+ GB/s bus bandwidth of 4 ranks, 0.00 expected$", output, re.M), output
    assert re.search(r"^\? rank to rank +[\d.]+ GB/s from rank 0 to 2, 100000.00 expected$", output, re.M), output
    assert output.count("note: rank to rank: 0% of what the site file expects") == 1
    for line in ("n0 ", "n1 ", "limits ", "/dev/shm ", "huge pages "):
        assert len(re.findall(rf"^[ ?] +{line}", output, re.M)) == 1, line
