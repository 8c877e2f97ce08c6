"""Samples that are read back from the archive: as text, aligned with their tokens, from damaged and hostile files."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from hpcrl.observe.read.samples import StepArchive, read_step_samples, recorded_steps
from hpcrl.observe.read.token_text import TokenText
from hpcrl.observe.record.archive import ArchiveError, step_path
from hpcrl.sandbox.foreign_files import printable
from tests.observe.recorded_run import END, byte_level, sentence_piece, word_level, write_config, write_step

ROOT = Path(__file__).parents[2]
TEXTS = [
    ("a question", "the answer is 42"),
    ("a question", "déjà 漢字 🙂👩\u200d🚀, 13"),
    ("another\n", "tabs\tand \x1b[31mescapes"),
    ("another\n", ""),
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of one step, whose tokenizer is beside it."""
    run = tmp_path / "runs" / "small"
    write_config(run, str(tmp_path / "tokenizer"))
    (tmp_path / "tokenizer").mkdir()
    byte_level().save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    write_step(run, 7, TEXTS, byte_level())
    return run


def test_a_sample_is_what_was_archived(run: Path) -> None:
    assert recorded_steps(run) == [7]
    samples = read_step_samples(run, 7)
    assert [(sample.prompt, sample.response) for sample in samples] == TEXTS
    for position, sample in enumerate(samples):
        assert "".join(sample.token_texts) == TEXTS[position][1] + END
        assert (sample.step, sample.uid, sample.sample_index) == (7, f"a.parquet:{position // 2}:0", position % 2)
        assert (sample.data_source, sample.finish_reason, sample.score) == ("test", "stop", position / 4)
        assert sample.parts == {"acc": float(position % 2), "format": 0.5, "note": "ok"}
        columns = (sample.rollout_log_probs, sample.old_log_probs, sample.advantages, sample.entropies)
        for number, values in enumerate(columns, 1):
            np.testing.assert_array_equal(values, np.arange(sample.length, dtype=np.float32) / 8 - number - position)
        assert len(sample.token_texts) == sample.length == len(sample.advantages)
    (only,) = read_step_samples(run, 7, rows=[2])
    assert only.response == TEXTS[2][1]


def test_columns_that_were_not_recorded_are_none(run: Path) -> None:
    """As in runs from before the archive had entropies, and of jobs without an estimator."""
    write_step(run, 8, TEXTS, byte_level(), columns=("rollout_log_probs",))
    (sample, *_) = read_step_samples(run, 8)
    assert sample.rollout_log_probs is not None
    assert (sample.advantages, sample.old_log_probs, sample.entropies, sample.response_mask) == (None,) * 4


@pytest.mark.parametrize("make", [byte_level, sentence_piece, word_level])
@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=20), cut=st.integers(0, 60), extra=st.lists(st.integers(0, 310), max_size=6))
def test_the_parts_of_tokens_join_to_the_text(
    make: Callable[[], Tokenizer], text: str, cut: int, extra: list[int]
) -> None:
    """Also where a character is torn at the end, or in the middle of what a model has sampled."""
    tokenizer = MADE.setdefault(make, make())
    ids = [*extra, *tokenizer.encode(text, add_special_tokens=False).ids[:cut]]
    pieces = TokenText(tokenizer).pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)


MADE: dict[Callable[[], Tokenizer], Tokenizer] = {}


@pytest.mark.parametrize(
    ("recorded", "place"),
    [
        ("configs/tok", "configs/tok"),  # relative to the folder in which the job ran, seen from runs/<name>
        ("configs/tok", "runs/small/bundle_0a1b2c3d/inputs/configs/tok"),
        ("/gone/runs/small/bundle_0a1b2c3d/inputs/tok", "runs/small/bundle_0a1b2c3d/inputs/tok"),  # a copied run
        ("/gone/tok", "runs/small/tokenizer"),
        (None, "runs/small/checkpoints/step_00000010/huggingface"),
    ],
)
def test_where_the_tokenizer_is_found(tmp_path: Path, recorded: str | None, place: str) -> None:
    run = tmp_path / "runs" / "small"
    write_config(run, recorded)
    write_step(run, 1, TEXTS, byte_level())
    (tmp_path / place).mkdir(parents=True)
    byte_level().save(str(tmp_path / place / "tokenizer.json"))
    assert [sample.response for sample in read_step_samples(run, 1)] == [response for _, response in TEXTS]


@pytest.mark.parametrize("damage", [None, "{", '{"model": {"type": "BPE"}}'])
def test_without_a_tokenizer_ids_are_shown_and_one_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str | None
) -> None:
    run = tmp_path / "runs" / "small"
    write_config(run, "/gone/tok")
    for step in (1, 2):
        write_step(run, step, TEXTS, byte_level())
    if damage is not None:
        (run / "tokenizer").mkdir()
        (run / "tokenizer" / "tokenizer.json").write_text(damage)
    with caplog.at_level(logging.WARNING):
        found = {step: read_step_samples(run, step) for step in recorded_steps(run)}
    ids = byte_level().encode(TEXTS[0][1], add_special_tokens=False).ids
    assert found[1][0].response.split() == [*map(str, ids), str(byte_level().token_to_id(END))]
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (1 if damage is None else 2) and "no tokenizer.json for model.tokenizer=/gone/tok" in lines[-1]


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(path: Path) -> None:
    with h5py.File(path) as file:
        place = file["tokens/input_ids/values"].id.get_chunk_info(0).byte_offset
    whole = path.read_bytes()
    path.write_bytes(whole[:place] + b"\xff" * 4 + whole[place + 4 :])


@pytest.mark.parametrize("damage", [half, flipped, lambda path: path.write_bytes(b""), Path.unlink])
def test_a_damaged_or_half_copied_step_is_one_error(run: Path, damage: Callable[[Path], object]) -> None:
    damage(step_path(run / "rollouts", 7))
    with pytest.raises(ArchiveError, match=r"step_00000007\.h5: (no such rollout file|not a whole rollout archive)"):
        read_step_samples(run, 7)


def replace_dataset(name: str, values: object) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[name]
        file[name] = values

    return change


@pytest.mark.parametrize(
    "change",
    [
        replace_dataset("samples/score", np.array([b"high"] * 4)),
        replace_dataset("samples/response_length", np.array([1, 2, 3, 4])),
        replace_dataset("samples/prompt_length", np.array([1.5] * 4)),
        replace_dataset("samples/prompt_length", np.array([-1] * 4)),
        replace_dataset("tokens/input_ids/values", np.full(3, 2**40)),
        lambda file: file["samples"].pop("uid"),
        lambda file: file.pop("tokens"),
    ],
)
def test_an_archive_of_another_shape_is_one_error(run: Path, change: Callable[[h5py.File], object]) -> None:
    with h5py.File(step_path(run / "rollouts", 7), "r+") as file:
        change(file)
    with pytest.raises(ArchiveError) as caught:
        read_step_samples(run, 7)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("extras", ["", "[1]", "{", "[" * 5000, "NaN", '{"a": {"b": [1]}}'])
def test_extras_that_are_no_object_are_left_out(run: Path, extras: str) -> None:
    write_step(run, 8, TEXTS, byte_level(), extras=[extras] * 4)
    (sample, *_) = read_step_samples(run, 8)
    assert sample.parts == (json.loads(extras) if extras.startswith('{"') else {})


def test_texts_are_decoded_only_when_they_are_asked_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    monkeypatch.setattr(TokenText, "pieces", lambda self, ids: decoded.append(len(ids)) or [])
    archive = StepArchive(run, 7)
    assert archive.columns["score"].tolist() == [0.0, 0.25, 0.5, 0.75] and decoded == []
    archive.sample(3)
    assert decoded == [1]


@given(st.text())
def test_printable_text_has_nothing_that_a_terminal_acts_on(text: str) -> None:
    shown = printable(text)
    controls = {*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
    assert not {ord(character) for character in shown} & (controls - {9, 10})
    assert shown == text or any(not character.isprintable() for character in text)
    assert "\n" not in printable(text, one_line=True)


def test_samples_are_read_without_torch(run: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from hpcrl.observe.read.samples import read_step_samples
assert read_step_samples(Path({str(run)!r}), 7)[0].response == {TEXTS[0][1]!r}
print(*(name for name in ("torch", "transformers", "mpi4py", "megatron", "pydantic") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
