"""The output of `hpcrl generate` across attempts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from hpcrl.observe.record.writer import json_line
from hpcrl.run.inference import GenerationFile, Key
from hpcrl.runtime.exits import InputError

KEYS = [
    Key(f"data:{row}:0", sample, {"prompt_ids": [row], "ground_truth": "7"}) for row in range(3) for sample in range(2)
]
SETTINGS = {"rollout.temperature": 1.0, "model.init_from": None}


def opened(path: Path, settings: Mapping[str, object] = SETTINGS, keys: list[Key] = KEYS) -> GenerationFile:
    return GenerationFile(path, settings, iter(keys), len(keys))


def line(number: int) -> str:
    uid, sample, prompt = KEYS[number]
    row = {"uid": uid, "sample_index": sample, "response_ids": [1] * number, "finish_reason": "length", "score": 0.5}
    return json.dumps(row | dict(prompt)) + "\n"


def write(path: Path, count: int) -> bytes:
    file = opened(path)
    for number in range(count):
        file.append([line(number)])
    file.close()
    return path.read_bytes()


@pytest.mark.parametrize("torn", [b"", b'{"uid": "data:1', b"\0\0\0\0", b"{}\n{}\n", b"null"])
def test_goes_on_behind_the_last_whole_line(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "deep" / "out.jsonl"
    whole = write(path, 4)
    path.write_bytes(whole + torn)
    file = opened(path)
    assert (file.totals.num_samples, file.totals.num_tokens, file.totals.longest) == (4, 0 + 1 + 2 + 3, 3)
    assert (file.totals.num_cut, file.totals.num_scored, file.totals.score) == (4, 4, 0.5)
    assert not file.is_complete
    file.append([line(4), line(5)])
    file.close()
    assert path.read_bytes() == whole + (line(4) + line(5)).encode()
    assert opened(path).is_complete


def test_a_complete_file_stays_as_it_is(tmp_path: Path) -> None:
    whole = write(tmp_path / "out.jsonl", 6)
    opened(tmp_path / "out.jsonl").close()
    opened(tmp_path / "out.jsonl", keys=KEYS[:4]).close()  # fewer prompts are asked for now
    assert (tmp_path / "out.jsonl").read_bytes() == whole


def test_samples_of_another_job_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    whole = write(path, 4)
    with pytest.raises(InputError, match=r"holds samples of rollout.temperature=1.0, and this job has 0.5; choose"):
        opened(path, {**SETTINGS, "rollout.temperature": 0.5})
    with pytest.raises(InputError, match="line 3 is sample 0 of data:1:0, expected sample 0 of data:9:0"):
        opened(path, keys=[*KEYS[:2], Key("data:9:0", 0, {})])
    for name, value in (("prompt_ids", [9]), ("ground_truth", "8")):
        other = KEYS[2]._replace(prompt={**KEYS[2].prompt, name: value})
        with pytest.raises(
            InputError, match=f"line 3 has another {name} than data:1:0 has now: the data files have ch"
        ):
            opened(path, keys=[*KEYS[:2], other, *KEYS[3:]])
    (tmp_path / "out.jsonl.settings.json").unlink()
    with pytest.raises(InputError, match="exists, without the out.jsonl.settings.json of its job"):
        opened(path)
    assert path.read_bytes() == whole


def test_any_text_becomes_json(tmp_path: Path) -> None:
    """Half of a surrogate pair, which JSON can write and UTF-8 cannot."""
    file = opened(tmp_path / "out.jsonl")
    file.append([json_line({"text": "\ud800 ü"})])
    file.close()
    assert json.loads((tmp_path / "out.jsonl").read_bytes()) == {"text": "\ud800 ü"}
