from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def test_every_rank_has_a_file_and_rank_0_alone_speaks(run_job: Callable, tmp_path: Path) -> None:
    ended = run_job(3, "log")
    assert ended.stderr == ""
    assert [line.split(" ", 1)[1] for line in ended.stdout.splitlines()] == ["said by rank 0"]
    for rank in range(3):
        text = (tmp_path / "runs" / "small" / "logs" / f"rank_{rank:05d}.log").read_text()
        for words in (f"said by rank {rank}", f"muttered by rank {rank}", "UserWarning: warned"):
            assert words in text
