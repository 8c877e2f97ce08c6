"""Prompt datasets: what a good file gives, and the one line that a bad one gets."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from hpcrl.config.schema import DataConfig
from hpcrl.data.answers import AnswerDataset
from hpcrl.data.prompts import PromptDataset, truncate
from hpcrl.data.row_file import short_names
from hpcrl.runtime.exits import InputError

ANSWER = {"sft.answer_key": "answer"}


def _row(content: Any, **more: Any) -> dict[str, Any]:
    return {
        "data_source": "countdown",
        "prompt": [{"role": "user", "content": content}] if isinstance(content, str) else content,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": {"numbers": [1, 2], "target": 3}},
        "extra_info": {"index": 7},
        **more,
    }


def _write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _text(tokenizer: Any, ids: np.ndarray) -> str:
    return tokenizer.decode(ids.tolist())


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_rows_come_back_tokenised_and_with_their_record(tmp_path: Path, tokenizer: Any, suffix: str) -> None:
    path = _write(tmp_path / f"train{suffix}", [_row("1 2 3:", answer="<a>1+2</a>"), _row("4 5 9:", answer="x")])
    data = PromptDataset([path], tokenizer, DataConfig(), -1)
    assert len(data) == 2
    assert data.prompt_ids(1).dtype == np.int32
    assert data.prompt_ids(1)[0] == tokenizer.bos_token_id
    assert _text(tokenizer, data.prompt_ids(1)) == "<|bos|>4 5 9:"
    assert data.prompt_lengths.tolist() == [7, 7]
    assert data.record(0) == {
        "data_source": "countdown",
        "ground_truth": {"numbers": [1, 2], "target": 3},
        "extra_info": {"index": 7},
        "ability": "math",
        "prompt": [{"role": "user", "content": "1 2 3:"}],
    }
    assert data.row(0)["answer"] == "<a>1+2</a>"
    assert data.uid(1, 4) == f"train{suffix}:1:4"
    assert set(data.source_of_rows()) == {"countdown"}


def test_only_prompt_is_required_and_may_be_a_string(tmp_path: Path, tokenizer: Any) -> None:
    path = _write(tmp_path / "plain.jsonl", [{"q": "1:"}, {"q": [{"role": "user", "content": "22:"}]}, {"q": "333:"}])
    data = PromptDataset([path], tokenizer, DataConfig(prompt_key="q"), -1)
    assert [_text(tokenizer, data.prompt_ids(i)) for i in range(3)] == ["<|bos|>1:", "<|bos|>22:", "<|bos|>333:"]
    record = data.record(0)
    assert (record["data_source"], record["ground_truth"], record["extra_info"]) == ("", None, {})


def test_a_record_that_is_not_verls_is_one_line(tmp_path: Path, tokenizer: Any) -> None:
    rows = [_row("1", reward_model="3"), _row("1", extra_info=[1]), _row("1", reward_model=None, extra_info=None)]
    data = PromptDataset([_write(tmp_path / "a.jsonl", rows)], tokenizer, DataConfig(), -1)
    with pytest.raises(InputError, match=r"row 0: column 'reward_model' holds '3'; expected a mapping"):
        data.record(0)
    with pytest.raises(InputError, match=r"row 1: column 'extra_info' holds"):
        data.record(1)
    assert data.record(2)["ground_truth"] is None
    with pytest.raises(InputError, match=r"row 0: column 'reward_model' holds"):
        list(data.ground_truths())


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_record_has_the_keys_of_its_own_row(tmp_path: Path, tokenizer: Any, suffix: str) -> None:
    """Of what scorers and tools get: a Parquet struct has the keys of all rows, with nulls."""
    infos = [
        {"index": 1, "tools_kwargs": {"search": {"limit": 3}}},
        {"index": 2, "tools_kwargs": {"run": {"args": [None]}}},
    ]
    truths = [{"target": ["a"]}, {"numbers": [1, 2], "target": None}]
    rows = [
        _row("1", extra_info=info, reward_model={"style": "rule", "ground_truth": truth})
        for info, truth in zip(infos, truths, strict=True)
    ]
    data = PromptDataset([_write(tmp_path / f"a{suffix}", rows)], tokenizer, DataConfig(), -1)
    assert [data.record(row)["extra_info"] for row in range(2)] == infos
    assert [truth for _, truth in data.ground_truths()] == [{"target": ["a"]}, {"numbers": [1, 2]}]


def test_files_of_several_chunks_and_kinds(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrl.data.prompts.TOKENISE_ROWS", 3)
    first = _write(tmp_path / "a.parquet", [_row(f"{i}") for i in range(7)])
    second = _write(tmp_path / "b.jsonl", [_row(f"{i}") for i in range(10, 14)])
    for max_samples in (-1, 3, 7, 9, 50):
        data = PromptDataset([first, second], tokenizer, DataConfig(), max_samples)
        expected = [*range(7), *range(10, 14)][: max_samples if max_samples >= 0 else None]
        assert [_text(tokenizer, data.prompt_ids(i)) for i in range(len(data))] == [f"<|bos|>{i}" for i in expected]
        assert [int(data.record(i)["prompt"][0]["content"]) for i in range(len(data))] == expected
        assert data.values("data_source") == ["countdown"] * len(expected)


def test_chat_template_of_the_config_and_its_arguments(tmp_path: Path, tokenizer: Any) -> None:
    path = _write(tmp_path / "a.jsonl", [_row("1")])
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ mark }}{% if add_generation_prompt %}={% endif %}"
    cfg = DataConfig(chat_template=template, apply_chat_template_kwargs={"mark": "9"})
    assert _text(tokenizer, PromptDataset([path], tokenizer, cfg, -1).prompt_ids(0)) == "19="


def test_uids_are_unique_where_file_names_repeat(tmp_path: Path, tokenizer: Any) -> None:
    paths = [_write(tmp_path / folder / "train.jsonl", [_row("1"), _row("2")]) for folder in ("a", "b")]
    data = PromptDataset(paths, tokenizer, DataConfig(), -1)
    assert [data.uid(i, 0) for i in range(4)] == [
        "a/train.jsonl:0:0", "a/train.jsonl:1:0", "b/train.jsonl:0:0", "b/train.jsonl:1:0"
    ]  # fmt: skip
    assert short_names(["x/t.pq", "x/t.pq", "v.pq"]) == ["t.pq", "t.pq#2", "v.pq"]
    assert short_names(["t.pq", "x/t.pq", "y/x/t.pq"]) == ["t.pq", "x/t.pq", "y/x/t.pq"]


def test_filter_keeps_row_numbers_and_max_samples_comes_first(tmp_path: Path, tokenizer: Any) -> None:
    path = _write(tmp_path / "a.parquet", [_row("1" * n) for n in (2, 9, 3, 1)])
    cfg = DataConfig(max_prompt_length=4, filter_overlong_prompts=True)
    data = PromptDataset([path], tokenizer, cfg, -1)
    assert [data.uid(i, 0) for i in range(len(data))] == ["a.parquet:0:0", "a.parquet:2:0", "a.parquet:3:0"]
    assert _text(tokenizer, data.prompt_ids(1)) == "<|bos|>111"
    assert data.num_filtered == 1
    assert len(PromptDataset([path], tokenizer, cfg, 2)) == 1


def test_truncation_modes() -> None:
    ids = [0, 1, 2, 3, 4, 5, 6]
    assert truncate(ids, 3, "left") == [4, 5, 6]
    assert truncate(ids, 3, "right") == [0, 1, 2]
    assert truncate(ids, 3, "middle") == [0, 5, 6]
    assert truncate(ids, 4, "middle") == [0, 1, 5, 6]
    assert truncate(ids, 1, "middle") == [6]


@pytest.mark.parametrize(("mode", "text"), [("left", "2345"), ("right", "<|bos|>123"), ("middle", "<|bos|>145")])
def test_truncated_prompts(tmp_path: Path, tokenizer: Any, mode: Any, text: str) -> None:
    path = _write(tmp_path / "a.jsonl", [_row("12345")])
    data = PromptDataset([path], tokenizer, DataConfig(max_prompt_length=4, truncation=mode), -1)
    assert _text(tokenizer, data.prompt_ids(0)) == text


def _refusal(paths: list[str], tokenizer: Any, **cfg: Any) -> str:
    with pytest.raises(InputError) as error:
        PromptDataset(paths, tokenizer, DataConfig(**cfg), -1)
    line = str(error.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.parquet", None, r"a\.parquet: no such file; expected a Parquet or JSONL file"),
        ("a.parquet", b"", r"a\.parquet: not a readable Parquet file"),
        ("a.parquet", b"garbage" * 1000, r"a\.parquet: not a readable Parquet file"),
        ("a.parquet", b"PAR1" + b"\x00" * 200 + b"PAR1", r"a\.parquet: not a readable Parquet file"),
        ("a.jsonl", b'{"prompt": "1"}\n\n{"prompt": \n', r"a\.jsonl:3: not JSON"),
        ("a.jsonl", b'{"prompt": "1"}\n[1]\n', r"a\.jsonl:2: found a JSON list"),
        ("a.jsonl", b"\xff\xfe\n", r"a\.jsonl:1: not JSON"),
        ("a.jsonl", b"[" * 100000, r"a\.jsonl:1: not JSON"),
        ("a.jsonl", b'{"a": ' + b"[" * 700 + b"]" * 700 + b"}", r"a\.jsonl:1: (values are nested too deep|not JSON)"),
        ("a.jsonl", b'{"question": "1"}\n', r"no column 'prompt'; it has question; .* data\.prompt_key"),
        ("a.jsonl", b"\n", r"a\.jsonl: empty dataset: no rows"),
        ("a.csv", b"prompt\n1\n", r"suffix \.csv is not supported; expected one of \.parquet"),
        ("a", b"1", r"suffix \(none\) is not supported"),
        ("a.jsonl", b'{"prompt": "1"}\n{"other": 1}\n', r"a\.jsonl: row 1: column 'prompt' holds 'None'"),
        ("a.jsonl", b'{"prompt": []}\n', r"row 0: column 'prompt' holds '\[\]'; expected a string, or"),
        ("a.jsonl", b'{"prompt": [{"role": "user", "content": [1]}]}\n', r"row 0: column 'prompt' holds"),
        (
            "a.jsonl",
            b'{"prompt": "12"}\n{"prompt": "12345"}\n',
            r"row 1: the prompt has 6 tokens, more than data\.max_pro",
        ),
        ("a.jsonl", b'{"prompt": "1"}\n{"prompt": "hello"}\n', r"row 1: the tokenizer cannot encode 'hello'"),
        (
            "a.jsonl",
            b'{"prompt": "1"}\n{"prompt": "2\\ud83d"}\n',
            r"row 1: found half of a surrogate pair, '\\ud83d', after '2'; expected Unicode text",
        ),
    ],
)
def test_bad_files_get_one_line(tmp_path: Path, tokenizer: Any, name: str, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert re.search(said, _refusal([str(tmp_path / name)], tokenizer, max_prompt_length=4))


def test_parquet_without_prompt_or_rows_and_an_empty_filter_result(tmp_path: Path, tokenizer: Any) -> None:
    no_prompt = _write(tmp_path / "a.parquet", [{"text": "1", "id": 1}])
    assert "no column 'prompt'; it has id, text;" in _refusal([no_prompt], tokenizer)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), tmp_path / "b.parquet")
    assert "empty dataset: no rows" in _refusal([str(tmp_path / "b.parquet")], tokenizer)
    long = _write(tmp_path / "c.parquet", [_row("12345")])
    line = _refusal([long], tokenizer, max_prompt_length=4, filter_overlong_prompts=True)
    assert "empty dataset: all 1 prompts are longer than data.max_prompt_length=4" in line
    assert "no data files" in _refusal([], tokenizer)
    assert "a directory" in _refusal([str(tmp_path)], tokenizer)


def test_a_template_that_fails_is_one_line(tmp_path: Path, tokenizer: Any) -> None:
    path = _write(tmp_path / "a.jsonl", [_row("1")])
    line = _refusal([path], tokenizer, chat_template="{{ raise_exception('no\nsystem role') }}")
    assert "row 0: the chat template failed" in line and "no system role" in line
    assert "the chat template failed" in _refusal([path], tokenizer, chat_template="{% if %}")


def test_sft_pairs_end_with_eos(tmp_path: Path, tokenizer: Any) -> None:
    path = _write(tmp_path / "a.jsonl", [_row("1 2 3:", answer="<a>1+2</a>"), _row("4:", answer="4")])
    data = AnswerDataset([path], tokenizer, DataConfig(max_response_length=11), ANSWER)
    prompt, answer = data.pair(0)
    assert prompt.dtype == answer.dtype == np.int32
    assert _text(tokenizer, prompt) + _text(tokenizer, answer) == "<|bos|>1 2 3:<a>1+2</a><|eos|>"
    assert answer[-1] == tokenizer.eos_token_id
    assert data.lengths().tolist() == [7 + 11, 3 + 2]
    with pytest.raises(InputError, match="row 0: the answer in .answer. has 11 tokens"):
        AnswerDataset([path], tokenizer, DataConfig(max_response_length=10), ANSWER)
    cut = AnswerDataset([path], tokenizer, DataConfig(max_response_length=10, truncation="right"), ANSWER)
    assert _text(tokenizer, cut.pair(0)[1]) == "<a>1+2</a>"


def test_sft_without_answers_is_one_line(tmp_path: Path, tokenizer: Any) -> None:
    path = _write(tmp_path / "a.jsonl", [_row("1", answer="1"), _row("2")])
    with pytest.raises(InputError, match=r"row 1: no column 'answer'; .* sft\.answer_key"):
        AnswerDataset([path], tokenizer, DataConfig(), ANSWER)
    with pytest.raises(InputError, match="row 0: column .extra_info. holds"):
        AnswerDataset([path], tokenizer, DataConfig(), {"sft.answer_key": "extra_info"})
