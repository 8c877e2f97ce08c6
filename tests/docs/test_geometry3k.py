"""The command of docs/vision.md for verl's geometry3k files, as it stands there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hpcrl.observe.read.archive import read_step
from hpcrl.observe.record.archive import step_path
from tests.docs.pages import ROOT, blocks_of
from tests.docs.test_commands import LINKS, make_environment, run, undocumented
from tests.geometry import write_geometry


@pytest.mark.slow
def test_three_steps_over_files_in_verls_layout(tmp_path: Path) -> None:
    (block,) = [block for block in blocks_of(ROOT / "docs" / "vision.md") if Path(__file__).name in block.mark]
    for name in LINKS:
        (tmp_path / name).symlink_to(ROOT / name)
    make_environment(tmp_path / ".venv" / "bin")
    (tmp_path / "data" / "geo3k").mkdir(parents=True)
    for split, num in (("train", 24), ("test", 4)):
        write_geometry(tmp_path / "data" / "geo3k" / f"{split}.parquet", num)
    run(replace(block, mark="runs"), tmp_path, tmp_path)
    folder = tmp_path / "runs" / "geometry3k_tiny"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "actor/grad_norm" in line] == [1, 2, 3]
    assert all(line["training/rollout_log_probs_diff_max"] < 1e-4 for line in lines if "actor/grad_norm" in line)
    _, samples, _ = read_step(step_path(folder / "rollouts", 1))
    for row, names in zip(samples["row"].tolist(), samples["pictures"].tolist(), strict=True):
        assert len(json.loads(names)) == (1, 2, 0)[row % 3]
    assert undocumented(tmp_path) == []
