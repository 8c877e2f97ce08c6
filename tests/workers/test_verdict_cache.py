"""Answers of a judge that outlive the process."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hpcrl.workers.judge import VerdictCache, answer_key


def test_an_answer_is_named_by_all_that_determines_it() -> None:
    names = {answer_key("judge", 7, 0.0, text) for text in ("a", "ab", "")} | {answer_key("judge", 7, 1.0, "a")}
    assert len(names) == 4 and answer_key("judge", 7, 0.0, "a") in names
    assert answer_key("a", "b") != answer_key("ab") and answer_key("\ud800") != answer_key("?")


def test_the_next_attempt_has_the_answers(tmp_path: Path) -> None:
    path = tmp_path / "judge" / "rank_00000.jsonl"
    cache = VerdictCache(path, 10)
    cache.put("a", "Score: 1\n\ud800")
    cache.put("b", "two")
    path.write_bytes(path.read_bytes()[:-4])  # a kill cut the last line off
    again = VerdictCache(path, 10)
    assert (again.get("a"), again.get("b"), again.get("c")) == ("Score: 1\n\ud800", None, None)
    again.put("b", "three")
    assert [VerdictCache(path, 10).get(key) for key in "ab"] == ["Score: 1\n\ud800", "three"]


def test_what_was_not_used_for_long_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rank_00000.jsonl"
    cache = VerdictCache(path, 2)
    for key in "abc":
        cache.put(key, key)
        assert cache.get("a") == "a"
    assert cache.get("b") is None and cache.get("c") == "c"
    for number in range(20):
        cache.put(str(number), "x")
    assert len(path.read_text().split()) < 2 * 2 * 2 + 2  # two words a line, twice the size at most
    assert VerdictCache(path, 2).get("19") == "x"


def test_a_full_disk_costs_the_file_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "judge").write_text("a file where the folder should be")
    cache = VerdictCache(tmp_path / "judge" / "rank_00000.jsonl", 2)
    with caplog.at_level(logging.WARNING):
        cache.put("a", "1")
        cache.put("b", "2")
    assert (cache.get("a"), cache.get("b")) == ("1", "2")
    assert caplog.text.count("judge: answers are no longer kept in") == 1
