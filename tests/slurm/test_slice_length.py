from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.config.schema import JobConfig
from hpcrl.runtime.exits import InputError
from hpcrl.slurm.submit import check_slice


def test_node_hours() -> None:
    assert JobConfig(time="1-02:03:04").time_seconds == 93784
    assert JobConfig(nodes=8, time="1-12:00:00").node_hours == 8 * 36
    assert JobConfig(nodes=3, time="00:20:00").node_hours == 1


@pytest.mark.parametrize(("time", "fits"), [("00:19:59", False), ("00:20:00", True)])
def test_a_slice_holds_set_up_a_step_and_a_save(time: str, fits: bool, tmp_path: Path) -> None:
    (tmp_path / "times.json").write_text(json.dumps({"setup_s": 400, "step_s": 500, "save_s": 100}))
    if fits:
        check_slice(JobConfig(time=time), tmp_path)
        return
    with pytest.raises(InputError, match=r"needs 1200 s .*setup 400 s \+ step 500 s \+ save 100 s"):
        check_slice(JobConfig(time=time), tmp_path)


def test_nothing_is_known_before_the_first_slice(tmp_path: Path) -> None:
    check_slice(JobConfig(time="00:06:00"), tmp_path)
    (tmp_path / "times.json").write_text("{")
    check_slice(JobConfig(time="00:06:00"), tmp_path)


def test_a_slice_is_longer_than_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="job.signal_seconds=300 ends a slice that long before"):
        check_slice(JobConfig(time="00:05:00"), tmp_path)
