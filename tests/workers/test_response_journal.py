"""Responses that were written through come back for exactly the requests whose answer they are."""

from __future__ import annotations

import os
import resource
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from hpcrl.batch.pictures import Picture
from hpcrl.config.schema import Config
from hpcrl.observe.record.archive import RecordLog, generation_log
from hpcrl.rollout.protocol import Request, SamplingParams, ToolPicture, Trajectory
from hpcrl.workers.response_journal import ResponseJournal

SAMPLING = SamplingParams(8, temperature=0.7, eos_token_ids=(2,))
REQUESTS = [Request([5, 6, prompt], f"a.parquet:{prompt}:0", sample) for prompt in range(6) for sample in range(2)]


def journal(folder: Path, rank: int = 0, **sections: dict[str, Any]) -> ResponseJournal:
    return ResponseJournal(folder, rank, Config.model_validate(sections))


def response(number: int) -> Trajectory:
    length = number % 5 + 1
    return Trajectory(
        np.arange(length, dtype=np.int32) + 10 * number,
        -np.arange(length, dtype=np.float32) / 7 - number,
        np.array([place % 3 != 1 for place in range(length)], np.int32),
        "length" if number % 2 else "stop",
        num_turns=number + 1,
        num_tool_calls=number,
        turn_scores=(0.5,) * (number % 3),
        routed_experts=np.arange(6 * length, dtype=np.int16).reshape(length, 6) - 1 if number % 3 else None,
        pictures=(ToolPicture(2**62 + number, Picture(3, (1, 2, 4), 0.5), b"a picture"),) * (number % 2),
    )


def write(folder: Path, num_ranks: int = 3, *, step: int = 21, version: int = 20) -> None:
    for rank in range(num_ranks):
        log = journal(folder, rank)
        log.begin(SAMPLING, step=step, version=version, recall=False)
        for number in range(rank, len(REQUESTS), num_ranks):
            log.write(REQUESTS[number], response(number))


def recalled(log: ResponseJournal, sampling: SamplingParams = SAMPLING, step: int = 21, version: int = 20) -> list[int]:
    """Numbers of the requests that need not be drawn; what comes back is what was written."""
    log.begin(sampling, step=step, version=version, recall=True)
    found = [(number, log.recall(request)) for number, request in enumerate(REQUESTS)]
    for number, done in found:
        if done is not None:
            for name, value in vars(response(number)).items():
                np.testing.assert_array_equal(getattr(done, name), value)
                assert getattr(getattr(done, name), "dtype", None) == getattr(value, "dtype", None)
    return [number for number, done in found if done is not None]


@pytest.mark.parametrize("rank", [0, 7])
def test_any_rank_recalls_what_all_ranks_of_another_layout_have_written(tmp_path: Path, rank: int) -> None:
    write(tmp_path, num_ranks=3)
    assert recalled(journal(tmp_path, rank)) == list(range(len(REQUESTS)))


def test_nothing_is_recalled_unless_asked(tmp_path: Path) -> None:
    write(tmp_path)
    log = journal(tmp_path)
    log.begin(SAMPLING, step=21, version=20, recall=False)
    assert log.recall(REQUESTS[0]) is None


@pytest.mark.parametrize(
    "other",
    [
        {"version": 19},
        {"sampling": replace(SAMPLING, temperature=0.0)},
        {"sampling": replace(SAMPLING, max_new_tokens=9)},
        {"sampling": replace(SAMPLING, eos_token_ids=(2, 3))},
        {"run": {"seed": 7}},
        {"model": {"num_layers": 9}},
        {"rollout": {"multi_turn": {"max_assistant_turns": 3}}},
    ],
    ids=str,
)
def test_what_other_weights_or_settings_have_drawn_is_left_and_counted(tmp_path: Path, other: dict[str, Any]) -> None:
    write(tmp_path)
    how = {name: other.pop(name) for name in ("version", "sampling") if name in other}
    log = journal(tmp_path, **other)
    assert recalled(log, **how) == []
    assert log.num_stale == len(REQUESTS)


def test_start_weights_are_told_apart_by_their_origin(tmp_path: Path) -> None:
    """Weights of version 1 are those of a checkpoint of this run."""
    steps = ((1, 0), (2, 1))
    one, other = (ResponseJournal(tmp_path, 0, Config.model_validate({}), origin) for origin in ("one", "other"))
    for step, version in steps:
        one.begin(SAMPLING, step=step, version=version, recall=False)
        one.write(REQUESTS[0], response(0))
    assert [recalled(other, step=step, version=version) for step, version in steps] == [[], [0]]


def test_a_row_whose_text_has_changed_is_drawn_again(tmp_path: Path) -> None:
    write(tmp_path)
    log = journal(tmp_path)
    log.begin(SAMPLING, step=21, version=20, recall=True)
    assert log.recall(replace(REQUESTS[3], prompt_ids=[5, 6, 99])) is None
    assert log.recall(REQUESTS[3]) is not None


def test_a_second_attempt_goes_on_in_the_log_of_the_first(tmp_path: Path) -> None:
    """Killed in the middle of a record; killed again; the third one has what both have finished."""
    write(tmp_path, num_ranks=1)
    path = generation_log(tmp_path, 21, 0)
    os.truncate(path, path.stat().st_size - 1)
    second = journal(tmp_path)
    assert recalled(second) == list(range(11))
    second.write(REQUESTS[11], response(11))
    assert recalled(journal(tmp_path)) == list(range(12))


def test_a_full_disk_costs_one_warning_a_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = journal(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # the write that reaches it is a short one
    try:
        for step in (21, 22):
            log.begin(SAMPLING, step=step, version=step - 1, recall=False)
            for number, request in enumerate(REQUESTS):
                log.write(request, response(number))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [line.levelname for line in caplog.records] == ["WARNING", "WARNING"]
    assert "File too large" in caplog.text
    for step in (21, 22):
        kept = recalled(journal(tmp_path), step=step, version=step - 1)
        assert kept == list(range(len(kept))) and 0 < len(kept) < len(REQUESTS)


def test_records_from_strangers_are_passed_over(tmp_path: Path) -> None:
    """Whole by their checksum, and still not responses; the good ones among them count."""
    good = journal(tmp_path)._record(REQUESTS[0], response(0))
    strange: list[Any] = [
        {**good, "token_ids": b"123"},
        {**good, "mask": b""},
        {**good, "log_probs": 5},
        {**good, "finish_reason": ["stop"]},
        {**good, "turn_scores": ["x"]},
        {**good, "num_turns": None},
        {**good, "sample_index": {}},
        {"uid": 1},
        {},
    ]
    log = RecordLog(generation_log(tmp_path, 21, 5))
    for record in strange:
        log.append(record)
    log.close()
    write(tmp_path, num_ranks=1)
    assert recalled(journal(tmp_path)) == list(range(len(REQUESTS)))
    path = generation_log(tmp_path, 21, 6)
    for payload in (b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", msgpack.packb([1, 2]), b"\xc1"):
        log = RecordLog(path)
        log.close()
        path.write_bytes(framed(payload))
        assert recalled(journal(tmp_path)) == list(range(len(REQUESTS)))


def framed(payload: bytes) -> bytes:
    return struct.pack("<II", len(payload), zlib.crc32(payload)) + payload
