from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl.runtime.exits import InputError, one_line
from hpcrl.runtime.job import PrintableFormatter, TerminalFormatter


def test_every_rank_has_a_file_and_rank_0_alone_speaks(run_job: Callable, tmp_path: Path) -> None:
    ended = run_job(3, "log")
    assert ended.stderr == ""
    assert [line.split(" ", 1)[1] for line in ended.stdout.splitlines()] == ["said by rank 0"]
    for rank in range(3):
        text = (tmp_path / "runs" / "small" / "logs" / f"rank_{rank:05d}.log").read_text()
        for words in (f"said by rank {rank}", f"muttered by rank {rank}", "UserWarning: warned"):
            assert words in text


HOSTILE = "SIGTERM\x1b[2J on \u202erank\x9b 3\x07"


@pytest.mark.parametrize("formatter", [TerminalFormatter(), PrintableFormatter("%(levelname)s %(message)s")])
def test_text_of_other_processes_is_logged_without_controls(formatter: logging.Formatter) -> None:
    record = logging.makeLogRecord({"msg": "stopping: %s\n%s", "args": (HOSTILE, "\tnext")})
    try:
        raise RuntimeError(HOSTILE)
    except RuntimeError as error:
        record.exc_info = RuntimeError, error, error.__traceback__
    text = formatter.format(record)
    assert text.count("SIGTERM\u241b[2J on <U+202E>rank<U+009B> 3\u2407") == 2 and "\n\tnext" in text
    assert not set(HOSTILE) & set(text) - set(" rank3SIGTERM[2Jo")


def test_an_error_line_has_no_controls() -> None:
    assert one_line(InputError(f"no file {HOSTILE}\nin x", "y\x1b")) == (
        "hpcrl: error: no file SIGTERM\u241b[2J on <U+202E>rank<U+009B> 3\u2407 in x\nhpcrl: error: y\u241b"
    )
