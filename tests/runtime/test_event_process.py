"""The loop that runs the commands of `job.on_event`, on pipes as rank 0 has them."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hpcrl.runtime import events
from hpcrl.runtime.events import RECORD_FILE, Runner, Settings


class RankZero:
    """A run's folder, and a thread in which the loop runs."""

    def __init__(self, folder: Path, *commands: str, owner: int | None = None) -> None:
        self.folder = folder
        (folder / "logs").mkdir()
        reader, self._events = os.pipe()
        self._results, writer = os.pipe()
        os.set_blocking(writer, False)
        self._log = open(folder / "logs" / "events.log", "ab", buffering=0)
        runner = Runner(reader, writer, Settings(str(folder), commands, owner=owner), self._log)
        self.thread = threading.Thread(target=runner.run)
        self.thread.start()

    def send(self, **message: Any) -> None:
        os.write(self._events, json.dumps(message).encode() + b"\n")

    def die(self) -> None:
        os.close(self._events)

    def rows(self) -> list[tuple[str, int, str | None]]:
        """What has run: event, step, problem."""
        if not (self.folder / RECORD_FILE).exists():
            return []
        rows = [json.loads(line) for line in (self.folder / RECORD_FILE).read_text().splitlines()]
        return [(row["event"], row["step"], row["problem"]) for row in rows]

    def ended(self, seconds: float = 10.0) -> list[tuple[str, int, str | None]]:
        self.thread.join(seconds)
        assert not self.thread.is_alive()
        return self.rows()

    def reported(self) -> str:
        os.set_blocking(self._results, False)
        try:
            return os.read(self._results, 1 << 16).decode()
        except BlockingIOError:
            return ""


@pytest.mark.parametrize("newest", [1, 2])
def test_no_command_runs_once_another_job_has_the_folder(tmp_path: Path, newest: int) -> None:
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / f"{newest:08d}.json").touch()
    rank = RankZero(tmp_path, "true", owner=1)
    rank.send(event="started", step=0, total_steps=9)
    rank.die()
    assert rank.ended()[-1:] == ([("failed", 0, None)] if newest == 1 else [])
    assert ("true" in (tmp_path / "logs" / "events.log").read_text()) == (newest == 1)


def test_events_run_in_order_and_the_end_is_the_last(tmp_path: Path) -> None:
    rank = RankZero(tmp_path, "true")
    rank.send(event="started", step=0, total_steps=9)
    rank.send(step=3)
    rank.send(event="saved", step=2)
    while len(rank.rows()) < 2:
        time.sleep(0.01)
    rank.send(end=85, reason="URG")
    assert rank.ended() == [("started", 0, None), ("saved", 2, None), ("left", 3, None)]


def test_at_the_end_waiting_events_are_dropped(tmp_path: Path) -> None:
    rank = RankZero(tmp_path, "sleep 0.5")
    rank.send(event="started", step=0, total_steps=9)
    for step in range(1, 9):
        rank.send(event="saved", step=step)
    time.sleep(0.2)
    rank.send(end=0, step=9)
    assert rank.ended() == [("started", 0, None), ("done", 9, None)]


@pytest.mark.parametrize(("code", "event"), [(1, "failed"), (2, "failed"), (86, "hang"), (87, "failed")])
def test_an_exit_json_of_an_unplanned_end_is_an_event_while_rank_0_lives(tmp_path: Path, code: int, event: str) -> None:
    rank = RankZero(tmp_path, "true")
    rank.send(event="started", step=4, total_steps=9)
    (tmp_path / "exit.json").write_text("{")  # not yet whole
    time.sleep(0.3)
    (tmp_path / "exit.json").write_text(json.dumps({"code": code, "error": "x" * 100_000}))
    assert rank.ended() == [("started", 4, None), (event, 4, None)]
    rank.die()


@pytest.mark.parametrize("code", [None, 0, 85])
def test_without_its_own_word_a_rank_0_that_is_gone_was_killed(tmp_path: Path, code: int | None) -> None:
    """Unless exit.json has a planned end, which it wrote before it could report it."""
    rank = RankZero(tmp_path, "true")
    if code is not None:
        (tmp_path / "exit.json").write_text(json.dumps({"code": code}))
    rank.die()
    assert rank.ended() == [({None: "failed", 0: "done", 85: "left"}[code], 0, None)]


def test_a_command_that_takes_too_long_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "COMMAND_SECONDS", 0.5)
    monkeypatch.setattr(events, "END_SECONDS", 0.5)
    (tmp_path / "slow.sh").write_text("sleep 3 && touch $1 & sleep 3 && touch $1")
    rank = RankZero(tmp_path, f"sh {tmp_path}/slow.sh {tmp_path}/late", "true")
    rank.send(event="started", step=0, total_steps=9)
    while len(rank.rows()) < 2:
        time.sleep(0.01)
    assert rank.rows() == [("started", 0, "killed after 0 s"), ("started", 0, None)]
    begin = time.monotonic()
    rank.send(end=0)
    assert rank.ended()[2][2].startswith("killed")
    assert time.monotonic() - begin < 2.5
    assert "on started, step 0: killed after" in rank.reported()
    time.sleep(3)
    assert not (tmp_path / "late").exists()
