from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.config.schema import Config
from hpcrl.runtime import exits, run_owner
from hpcrl.runtime.job import take_run_directory


def test_the_first_rank_that_fails_is_the_one_in_exit_json(tmp_path: Path) -> None:
    assert exits.write_exit(tmp_path, 1, 3, "actor", "update_actor", "ValueError: boom")
    assert not exits.write_exit(tmp_path, 1, 0, None, None, "MPI error: a peer is gone")
    record = json.loads((tmp_path / "exit.json").read_text())
    assert record == {"code": 1, "rank": 3, "role": "actor", "phase": "update_actor", "error": "ValueError: boom"}
    assert [path.name for path in tmp_path.iterdir()] == ["exit.json"], "drafts must not stay behind"


def test_a_later_attempt_starts_without_the_earlier_exit_json(tmp_path: Path) -> None:
    exits.write_exit(tmp_path, 85)
    take_run_directory(Config.model_validate({"run": {"dir": str(tmp_path.parent), "name": tmp_path.name}}))
    assert exits.write_exit(tmp_path, 0)
    run_owner.let_go()()


def test_a_report_is_made_even_where_exit_json_cannot_be_written(tmp_path: Path) -> None:
    assert exits.write_exit(tmp_path / "missing", 1)
    assert exits.write_exit(None, 1)


class ErrorOfALowerLayer(ValueError):
    user_error = True


@pytest.mark.parametrize(
    ("error", "code"),
    [(exits.InputError("x"), 2), (ErrorOfALowerLayer("x"), 2), (ValueError("x"), 1), (KeyboardInterrupt(), 130)],
)
def test_exit_codes(error: BaseException, code: int) -> None:
    assert exits.exit_code(error) == code


def test_an_error_is_one_line_whatever_its_text() -> None:
    assert exits.one_line(exits.InputError("bad\n  value")) == "hpcrl: error: bad value"
