from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.observe.read.archive import read_step
from hpcrl.observe.record.archive import (
    ArchiveError,
    RolloutLog,
    discard_from,
    finish_step,
    log_path,
    read_records,
    step_path,
)


def sample(position: int) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    length = position % 4
    tokens = {
        "input_ids": np.arange(length + 2, dtype=np.int32) + 10 * position,
        "rollout_log_probs": -np.arange(length, dtype=np.float32) / 7,
    }
    samples = {"position": position, "uid": f"a.parquet:{position}:0", "score": position / 3, "aborted": length == 0}
    return tokens, samples


def write_log(path: Path, positions: list[int]) -> None:
    log = RolloutLog(path)
    for position in positions:
        log.append_sample(*sample(position))
    log.close()


def finish(folder: Path, step: int = 20, report=pytest.fail) -> Path:
    return finish_step(folder, step, seed=7, weight_version=19, report=report)


def test_logs_of_all_ranks_become_one_file_in_order_of_position(tmp_path):
    write_log(log_path(tmp_path, 20, 0), [5, 0, 3])
    write_log(log_path(tmp_path, 20, 11), [4, 1, 2])
    write_log(log_path(tmp_path, 21, 0), [0])
    path = finish(tmp_path)
    assert path == tmp_path / "step_00000020.h5"
    tokens, samples, attributes = read_step(path)
    assert attributes == {"seed": 7, "step": 20, "weight_version": 19, "schema": 1}
    for name, dtype in (("input_ids", np.int32), ("rollout_log_probs", np.float32)):
        values, offsets = tokens[name]
        assert values.dtype == dtype and offsets.dtype == np.int64
        for position in range(6):
            row = values[offsets[position] : offsets[position + 1]]
            np.testing.assert_array_equal(row, sample(position)[0][name])
    for position in range(6):
        assert {name: values[position] for name, values in samples.items()} == sample(position)[1]
    assert isinstance(samples["uid"][0], str) and samples["score"].dtype == np.float64
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000020.h5", "step_00000021.rank_00000.log"]


def test_a_step_without_samples_has_a_file(tmp_path):
    assert read_step(finish(tmp_path))[:2] == ({}, {})


@pytest.mark.parametrize("text", ["", "déjà 漢字 🙂", "a\0b", "lone \ud800 surrogate"])
def test_any_text_that_a_model_writes_can_be_stored(tmp_path, text):
    log = RolloutLog(log_path(tmp_path, 1, 0))
    log.append_sample({}, {"position": 0, "text": text})
    log.close()
    _, samples, _ = read_step(finish(tmp_path, 1))
    assert samples["text"][0] == text.replace("\0", "\u2400").replace("\ud800", r"\ud800")


def test_numpy_scalars_are_numbers(tmp_path):
    log = RolloutLog(log_path(tmp_path, 1, 0))
    log.append_sample({}, {"position": np.int64(0), "score": np.float32(0.1), "n": np.int32(3)})
    log.close()
    _, samples, _ = read_step(finish(tmp_path, 1))
    assert np.float32(samples["score"][0]) == np.float32(0.1)
    assert samples["n"].dtype == np.int64


def test_what_was_appended_is_there_without_close(tmp_path):
    log = RolloutLog(tmp_path / "x.log")
    log.append_sample(*sample(3))
    assert len(list(read_records(tmp_path / "x.log", pytest.fail))) == 1
    log.close()


def log_bytes(count: int) -> tuple[bytes, list[int]]:
    """A log and the byte at which each record ends."""
    with tempfile.TemporaryDirectory() as folder:
        path, ends = Path(folder) / "x.log", []
        log = RolloutLog(path)
        for position in range(count):
            log.append_sample(*sample(position))
            ends.append(path.stat().st_size)
        log.close()
        return path.read_bytes(), ends


LOG, ENDS = log_bytes(4)


def read_bytes(data: bytes) -> tuple[list[int], list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.log"
        path.write_bytes(data)
        reports: list[str] = []
        return [record["samples"]["position"] for record in read_records(path, reports.append)], reports


def test_a_log_cut_at_any_byte_keeps_the_whole_records():
    for cut in range(len(LOG) + 1):
        whole = sum(end <= cut for end in ENDS)
        positions, reports = read_bytes(LOG[:cut])
        assert positions == list(range(whole))
        assert len(reports) == (cut not in (0, *ENDS)), cut


@settings(deadline=None, max_examples=200)
@given(st.integers(0, len(LOG) - 1), st.integers(1, 255))
def test_a_damaged_byte_drops_its_record_and_what_follows(place, flip):
    data = bytearray(LOG)
    data[place] ^= flip
    positions, reports = read_bytes(bytes(data))
    assert positions == list(range(sum(end <= place for end in ENDS)))
    assert len(reports) == 1 and "x.log" in reports[0]


@settings(deadline=None, max_examples=100)
@given(st.binary(min_size=1, max_size=200))
def test_garbage_is_never_a_record(garbage):
    positions, reports = read_bytes(LOG + garbage)
    assert positions == [0, 1, 2, 3] and len(reports) == 1


def test_zeros_after_a_power_loss_are_no_records():
    assert read_bytes(LOG + struct.pack("<II", 0, 0) * 3)[0] == [0, 1, 2, 3]


def test_a_torn_log_is_reported_and_the_rest_merged(tmp_path):
    write_log(log_path(tmp_path, 20, 0), [0, 2])
    write_log(log_path(tmp_path, 20, 1), [1, 3])
    torn = log_path(tmp_path, 20, 1)
    torn.write_bytes(torn.read_bytes()[:-1])
    reports: list[str] = []
    _, samples, _ = read_step(finish(tmp_path, report=reports.append))
    assert samples["position"].tolist() == [0, 1, 2]
    assert len(reports) == 1 and "step_00000020.rank_00001.log" in reports[0] and "kept 1 samples" in reports[0]


def test_a_kill_before_the_rename_leaves_the_logs(tmp_path, monkeypatch):
    write_log(log_path(tmp_path, 20, 0), [0, 1])

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("os.replace", killed)
        finish(tmp_path)
    assert not step_path(tmp_path, 20).exists()
    assert len(read_step(finish(tmp_path))[1]["position"]) == 2


def test_records_that_do_not_fit_together_are_named(tmp_path):
    write_log(log_path(tmp_path, 20, 0), [0, 1])
    write_log(log_path(tmp_path, 20, 1), [1])
    with pytest.raises(ArchiveError, match="two samples have position 1"):
        finish(tmp_path)
    log = RolloutLog(log_path(tmp_path, 20, 1))
    log.append_sample({"input_ids": np.zeros(1, np.int32)}, sample(2)[1])
    log.close()
    with pytest.raises(ArchiveError, match="rollout_log_probs"):
        finish(tmp_path)


def test_a_log_of_an_earlier_attempt_is_replaced(tmp_path):
    write_log(log_path(tmp_path, 20, 0), [0, 1, 2])
    write_log(log_path(tmp_path, 20, 0), [0])
    assert read_step(finish(tmp_path))[1]["position"].tolist() == [0]


def test_discard_from_removes_later_steps_and_nothing_else(tmp_path):
    for step in (19, 20, 21):
        write_log(log_path(tmp_path, step, 0), [0])
    finish(tmp_path, 19)
    finish(tmp_path, 20)
    (tmp_path / "step_notes.txt").write_text("mine")
    discard_from(tmp_path, 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000019.h5", "step_notes.txt"]


def test_foreign_and_damaged_files_have_one_clear_error(tmp_path):
    write_log(log_path(tmp_path, 20, 0), list(range(50)))
    path = finish(tmp_path)
    whole = path.read_bytes()
    garbage = tmp_path / "garbage.h5"
    for content in (b"", b"not HDF5", whole[: len(whole) // 2]):
        garbage.write_bytes(content)
        with pytest.raises(ArchiveError, match=r"garbage\.h5") as caught:
            read_step(garbage)
        assert caught.value.user_error
    with h5py.File(garbage, "w") as file:
        file["x"] = [1]
    with pytest.raises(ArchiveError, match="schema"):
        read_step(garbage)
    with pytest.raises(ArchiveError, match="no such"):
        read_step(tmp_path / "none.h5")
    values = read_step(path)[0]["input_ids"][0].tobytes()
    flipped = bytearray(whole)
    flipped[whole.index(values) + 8] ^= 1
    garbage.write_bytes(flipped)
    with pytest.raises(ArchiveError, match="not a whole"):
        read_step(garbage)


def external_link(file: h5py.File, secret: Path) -> None:
    del file["tokens/input_ids"]
    file["tokens/input_ids"] = h5py.ExternalLink(str(secret), "tokens/input_ids")


def external_samples(file: h5py.File, secret: Path) -> None:
    del file["samples"]
    file["samples"] = h5py.ExternalLink(str(secret), "samples")


def soft_link(file: h5py.File, secret: Path) -> None:
    del file["samples/score"]
    file["samples/score"] = h5py.SoftLink("/samples/position")


def replace_scores(file: h5py.File, **options: Any) -> None:
    del file["samples/score"]
    file.create_dataset("samples/score", dtype="f8", **options)


def external_storage(file: h5py.File, secret: Path) -> None:
    replace_scores(file, shape=(4,), external=[(str(secret), 0, 32)])


def virtual(file: h5py.File, secret: Path) -> None:
    layout = h5py.VirtualLayout((4,), "f8")
    layout[:] = h5py.VirtualSource(str(secret), "samples/score", (4,))
    del file["samples/score"]
    file.create_virtual_dataset("samples/score", layout)


def compressed(file: h5py.File, secret: Path) -> None:
    replace_scores(file, data=np.zeros(4), compression="gzip")


def never_written(file: h5py.File, secret: Path) -> None:
    replace_scores(file, shape=(2**50,), chunks=(2**20,))


def table(file: h5py.File, secret: Path) -> None:
    replace_scores(file, data=np.zeros((4, 1000)))


def one_string_many_times(file: h5py.File, secret: Path) -> None:
    """`count` entries are made to point at the same string."""
    count, text = 1000, "x" * 50_000
    del file["samples/uid"]
    dataset = file.create_dataset("samples/uid", (count,), h5py.string_dtype("utf-8"))
    dataset[0] = text
    file.flush()
    name, offset = file.filename, dataset.id.get_offset()
    file.close()
    data = bytearray(Path(name).read_bytes())
    data[offset : offset + 16 * count] = data[offset : offset + 16] * count
    Path(name).write_bytes(data)


ATTACKS = {
    external_link: "ExternalLink",
    external_samples: "ExternalLink",
    soft_link: "SoftLink",
    external_storage: "other files",
    virtual: "other files",
    compressed: "compressed",
    never_written: "holds fewer",
    table: "one dimension",
    one_string_many_times: "longer strings",
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_archive_from_a_stranger_shows_no_other_file_and_fills_no_memory(
    tmp_path: Path, attack: Callable[[h5py.File, Path], None]
) -> None:
    for step in (20, 21):
        write_log(log_path(tmp_path, step, 0), [0, 1, 2, 3])
    path, secret = finish(tmp_path, 20), finish(tmp_path, 21)
    file = h5py.File(path, "r+")
    attack(file, secret)
    file.close()
    with pytest.raises(ArchiveError, match=ATTACKS[attack]):
        read_step(path)


def test_a_pipe_is_no_archive(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "step_00000001.h5")
    with pytest.raises(ArchiveError, match="a pipe; expected a regular file"):
        read_step(tmp_path / "step_00000001.h5")
