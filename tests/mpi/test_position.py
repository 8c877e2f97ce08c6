"""Jobs resumed with another batch size: each row once, in the order of the uninterrupted run."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from hpcrl.cli import load_job
from hpcrl.data.sampler import OrderedSampler, rows_at
from tests.mpi.lab import Lab, run_job

pytestmark = pytest.mark.ci_world(2)

FILES = {"sft": "sft", "rm": "preference", "sigmoid": "preference", "kto": "labelled", "train": "train"}


@pytest.mark.parametrize("kind", FILES)
def test_each_row_once(lab: Lab, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eleven rows: two steps of two, one of three, and of two again, with a resume before each change."""
    job = load_job("preference" if kind in ("sigmoid", "kto") else kind)
    taken: list[np.ndarray] = []
    draw = OrderedSampler.next_rows

    def recorded(self: OrderedSampler, n: int) -> Any:
        found = draw(self, n)
        taken.append(found[0])
        return found

    monkeypatch.setattr(OrderedSampler, "next_rows", recorded)
    data = {"train_files": [str(lab.data / f"{FILES[kind]}.parquet")], "max_response_length": 18}
    for size, total in ((2, 2), (3, 3), (2, None)):
        steps = {"total_training_steps": total, "total_epochs": 1}
        own = {"batch_size": size, "max_token_len_per_gpu": 192, **steps}
        own |= {"loss_type": kind} if job.name == "preference" else {}
        sections: dict[str, Any] = {"data": {**data, "train_max_samples": 11, "train_batch_size": size}}
        sections |= {
            "trainer": {
                "save_freq": 1,
                "max_ckpt_to_keep": None,
                **(steps if kind == "train" else {"total_training_steps": None}),
            }
        }
        sections |= {"actor": {"ppo_mini_batch_size": size}} if kind == "train" else {job.name: own}
        template = lab.config(f"position_{kind}", {}, sections)
        config = job.prepare(job.schema().model_validate(template))
        run_job(lab.world, job.name, config)
    if lab.world.rank == 0:
        checkpoints = sorted((lab.folder / f"position_{kind}" / "checkpoints").glob("step_*/trainer.json"))
        consumed = [json.loads(path.read_text())["consumed_rows"] for path in checkpoints]
        assert consumed == [2, 4, 7, 9, 11]
        assert np.concatenate(taken).tolist() == rows_at(np.arange(11), 11, config.run.seed, True)[0].tolist()
