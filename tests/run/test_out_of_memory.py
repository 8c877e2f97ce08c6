"""What `hpcrl train` says when a rank's GPU has not enough memory. The GPU is a fake: there is none in CI."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.preloaded import RANK
from tests.run.small_run import START, write_config
from tests.runtime.conftest import MPIEXEC, run, start  # noqa: F401  # fixtures

FAKE_GPU = """
import functools

import torch

from hpcrl.runtime import accelerator
from hpcrl.workers.actor import ActorWorker

update_actor, recorded = ActorWorker.update_actor, []
accelerator.record_memory_history = recorded.append
accelerator.dump_memory_history = lambda path: path.write_text(f"{len(recorded)} devices are recorded") > 0
accelerator.take_peak_bytes = lambda: (3 * 2**30, 4 * 2**30)

@functools.wraps(update_actor)
def run_out(self, batch):
    if (self.rank, batch.meta_info["step"]) == (1, 1):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated ...")
    return update_actor(self, batch)

ActorWorker.update_actor = run_out
"""


def test_the_error_names_the_phase_what_was_expected_there_and_what_needs_less(run: Callable, tmp_path: Path) -> None:  # noqa: F811
    script, folder = tmp_path / "script.py", tmp_path / "runs" / "ends"
    script.write_text(FAKE_GPU + START)
    ended = run(MPIEXEC, "-n", "2", *RANK, script, "train", write_config(tmp_path), "run.memory_snapshot=true")
    assert ended.code == 1
    snapshot = folder / "logs" / "oom_rank_00001.pickle"
    assert snapshot.read_text() == "1 devices are recorded"
    record = json.loads((folder / "exit.json").read_text())
    error = record.pop("error")
    assert record == {"code": 1, "rank": 1, "role": "actor", "phase": "update_actor"}
    told, had, expects, less, where = error.split("; ")
    assert told == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert had == ("rank 1 (actor, update_actor) had at most 3.00 GiB allocated and 4.00 GiB reserved in this phase")
    assert expects.startswith("`hpcrl plan` expects ") and "MiB: parameters 0." in expects and "gradients" in expects
    assert less == (
        "to need less: actor.ppo_max_token_len_per_gpu below 128, model.recompute.granularity=full, "
        "a larger placement.actor.tp or pp, model.lora_rank=16, actor.optim.exp_avg_dtype=bfloat16"
    )
    assert where == f"memory snapshot: {snapshot}, to be opened at https://pytorch.org/memory_viz"
    assert f"hpcrl: rank 1 failed (role actor, phase update_actor): {error}" in ended.stderr.splitlines()
    assert ended.stderr.count("Traceback") == 1 and "run_out" in ended.stderr
