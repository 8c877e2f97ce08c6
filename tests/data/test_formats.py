"""Files of other tools give the tokens, masks and labels of the same data in this program's own schema."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from hpcrl.config.schema import DataConfig
from hpcrl.data.answers import CHOSEN, REJECTED, AnswerDataset, LabelledDataset
from hpcrl.data.prompts import PromptDataset
from hpcrl.data.row_file import RowFile, columns_of
from hpcrl.data.supervision import SftDataset
from hpcrl.runtime.exits import InputError

TEMPLATE = (
    "{% for m in messages %}{{ '<' if m.role == 'assistant' else '>' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content + ':' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<{% endif %}"
)
ROUNDS = [[("1+1", "2")], [("3+4", "7"), ("+1", "8")], [("9-9", "0")]]
Rows = list[dict[str, Any]]


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def messages(rounds: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [said(role, text) for pair in rounds for role, text in zip(("user", "assistant"), pair, strict=True)]


OWN: Rows = [{"messages": messages(rounds)} for rounds in ROUNDS]
OWN_ANSWERS: Rows = [{"prompt": messages(rounds)[:-1], "answer": rounds[-1][1]} for rounds in ROUNDS]
SHAREGPT: Rows = [
    {
        "conversations": [
            {"from": sender, "value": text}
            for pair in rounds
            for sender, text in zip(("human", "gpt"), pair, strict=True)
        ]
    }
    for rounds in ROUNDS
]
ALPACA: Rows = [
    {
        "instruction": rounds[-1][0],
        "input": "",
        "output": rounds[-1][1],
        "history": [list(pair) for pair in rounds[:-1]],
    }
    for rounds in ROUNDS
]
COMPLETION: Rows = [{"prompt": messages(rounds)[:-1], "completion": rounds[-1][1]} for rounds in ROUNDS]
COMPLETION_MESSAGES: Rows = [row | {"completion": [said("assistant", row["completion"])]} for row in COMPLETION]


def write_jsonl(path: Path, rows: Rows) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def write_gzip(path: Path, rows: Rows) -> Path:
    path.write_bytes(gzip.compress("".join(f"{json.dumps(row)}\n" for row in rows).encode()))
    return path


def write_array(path: Path, rows: Rows) -> Path:
    path.write_text(json.dumps(rows, indent=1))
    return path


def write_parquet(path: Path, rows: Rows) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def write_arrow(path: Path, rows: Rows, schema: Any = None) -> Path:
    table = pyarrow.Table.from_pylist(rows, schema)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return path


def write_folder(path: Path, rows: Rows) -> Path:
    """As `datasets.Dataset.save_to_disk` does, in two files of one schema."""
    path.mkdir(parents=True)
    names = [f"data-0000{number}-of-00002.arrow" for number in range(2)]
    schema = pyarrow.Table.from_pylist(rows).schema
    for name, part in zip(names, (rows[:1], rows[1:]), strict=True):
        write_arrow(path / name, part, schema)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return path


KINDS: dict[str, Callable[[Path, Rows], Path]] = {
    "a.jsonl": write_jsonl,
    "a.jsonl.gz": write_gzip,
    "a.json": write_array,
    "a.parquet": write_parquet,
    "a.arrow": write_arrow,
    "folder": write_folder,
}


def config(**keys: Any) -> DataConfig:
    return DataConfig(max_prompt_length=64, max_response_length=64, chat_template=TEMPLATE, **keys)


def sequences(path: Path, tokenizer: Any, turns: str = "all", **keys: Any) -> list[list[list[int]]]:
    read = SftDataset([str(path)], tokenizer, config(**keys), messages_key="messages", answer_key="answer", turns=turns)
    return [[part.tolist() for part in read.sequence(row)] for row in range(len(read))]


@pytest.mark.parametrize("kind", KINDS)
def test_sft_reads_the_same_sequences_in_each_format_and_kind_of_file(
    kind: str, tmp_path: Path, tokenizer: Any
) -> None:
    own = sequences(write_jsonl(tmp_path / "own.jsonl", OWN), tokenizer)
    answers = sequences(write_jsonl(tmp_path / "answers.jsonl", OWN_ANSWERS), tokenizer)
    cases = {"sharegpt": (SHAREGPT, own), "alpaca": (ALPACA, answers), "completion": (COMPLETION, answers)}
    cases |= {"completion_messages": (COMPLETION_MESSAGES, answers), "own": (OWN, own)}
    for name, (rows, expected) in cases.items():
        (tmp_path / name).mkdir()
        path = KINDS[kind](tmp_path / name / kind, rows)
        assert sequences(path, tokenizer) == expected, name
        file = RowFile(str(path))
        assert sorted(columns_of(str(path))) == sorted(file.columns) and len(file) == len(rows)
        for column in file.columns:
            assert file.column(column, 1, 3) == [file[row].get(column) for row in (1, 2)]


@pytest.mark.parametrize("kind", ["a.json", "a.parquet", "folder"])
def test_pairs_and_labels(kind: str, tmp_path: Path, tokenizer: Any) -> None:
    explicit = [row | {"chosen": "1", "rejected": "2"} for row in ({"prompt": it["prompt"]} for it in OWN_ANSWERS)]
    implicit = [
        {side: [*row["prompt"], said("assistant", row[side])] for side in ("chosen", "rejected")} for row in explicit
    ]
    turned = [
        row | {"conversations": row["conversations"][:-1]}
        | {"chosen": {"from": "gpt", "value": "1"}, "rejected": {"from": "gpt", "value": "2"}}
        for row in SHAREGPT
    ]  # fmt: skip
    sides = ("chosen", "rejected")
    one_message = [row | {side: said("assistant", row[side]) for side in sides} for row in explicit]
    tasks = [
        {name: it for name, it in row.items() if name != "output"} | {"chosen": "1", "rejected": "2"} for row in ALPACA
    ]
    found = []
    cases = {"explicit": explicit, "implicit": implicit, "turned": turned, "message": one_message, "tasks": tasks}
    for name, rows in cases.items():
        (tmp_path / name).mkdir()
        path = KINDS[kind](tmp_path / name / kind, rows)
        columns = {"preference.chosen_key": "chosen", "preference.rejected_key": "rejected"}
        read = AnswerDataset([str(path)], tokenizer, config(), columns)
        found.append(
            [[ids.tolist() for ids in (*read.pair(row, CHOSEN), read.answer(row, REJECTED))] for row in range(3)]
        )
    assert all(one == found[0] for one in found)
    found = []
    for name, rows in {"completion": COMPLETION, "messages": SHAREGPT, "answer": ALPACA}.items():
        (tmp_path / name).mkdir()
        path = KINDS[kind](tmp_path / name / kind, [row | {"kto_tag": row is rows[1]} for row in rows])
        columns, label = {"preference.completion_key": name}, ("preference.label_key", "kto_tag")
        labelled = LabelledDataset([str(path)], tokenizer, config(), columns, label=label)
        assert labelled.labels.tolist() == [False, True, False]
        found.append([[ids.tolist() for ids in labelled.pair(row)] for row in range(3)])
    assert all(one == found[0] for one in found)


def test_prompts_of_other_tools(tmp_path: Path, tokenizer: Any) -> None:
    own = PromptDataset([str(write_jsonl(tmp_path / "own.jsonl", OWN_ANSWERS))], tokenizer, config())
    for name, rows in {"alpaca": ALPACA, "sharegpt": SHAREGPT}.items():
        read = PromptDataset([str(write_array(tmp_path / f"{name}.json", rows))], tokenizer, config())
        assert all(np.array_equal(read.prompt_ids(row), own.prompt_ids(row)) for row in range(3))


def test_a_system_message_an_input_and_tool_calls(tmp_path: Path) -> None:
    rows: Rows = [{"instruction": "add", "input": "1, 2", "output": "3", "system": "be brief"}]
    file = RowFile(str(write_array(tmp_path / "a.json", rows)))
    assert file[0]["prompt"] == [said("system", "be brief"), said("user", "add\n1, 2")]
    turns = [
        ("human", "hi"),
        ("function_call", '{"name": "f", "arguments": {"x": 1}}'),
        ("observation", "2"),
        ("gpt", "b"),
    ]
    rows = [{"conversations": [{"from": sender, "value": text} for sender, text in turns], "system": "be brief"}]
    read = RowFile(str(write_array(tmp_path / "b.json", rows)))[0]["messages"]
    assert [one["role"] for one in read] == ["system", "user", "assistant", "tool", "assistant"]
    assert read[2]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


def one_line(path: Path, **keys: Any) -> str:
    with pytest.raises(InputError) as raised:
        file = RowFile(str(path), **keys)
        [file[row] for row in range(len(file))]
    (line,) = raised.value.lines
    return str(line)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([ALPACA[0], SHAREGPT[0]], "fit the formats alpaca and sharegpt"),
        ([OWN[0] | SHAREGPT[0]], "fit the formats sharegpt and ready"),
        ([ALPACA[0], ALPACA[0] | {"output": " "}], "row 1: 'output' is empty; expected the answer"),
        ([{"conversations": [{"from": "parrot", "value": "x"}]}], "row 0: 'conversations' has a turn from 'parrot'"),
        ([{"conversations": []}], "row 0: 'conversations' holds '[]'"),
        ([SHAREGPT[0], {"other": 1}], "row 1: 'conversations' holds 'None'"),
        ([{"conversations": [{"from": "function_call", "value": "f(1)"}]}], "expected JSON {name, arguments}"),
        ([{"chosen": "a", "rejected": "b"}], "there is no column 'prompt', and 'chosen' holds 'a'"),
        ([{"chosen": messages([("a", "b")]), "rejected": messages([("c", "d")])}], "begin with different messages"),
        ([{"instruction": 3, "output": "x"}], "row 0: 'instruction' holds '3'; expected text"),
    ],
)
def test_bad_rows_are_one_line(rows: Rows, words: str, tmp_path: Path) -> None:
    line = one_line(write_jsonl(tmp_path / "bad.jsonl", rows))
    assert words in line and str(tmp_path / "bad.jsonl") in line


def test_bad_files_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"data": []}')
    assert "found a JSON dict; expected an array of objects" in one_line(tmp_path / "a.json")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "x"}\n' * 1000)[:40])
    assert "not a readable gzip file" in one_line(tmp_path / "b.jsonl.gz")
    (tmp_path / "c.arrow").write_bytes(b"no arrow")
    assert "not a readable Arrow file" in one_line(tmp_path / "c.arrow")
    write_folder(tmp_path / "splits" / "train", OWN)
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert "a folder of the splits train; expected one; name" in one_line(tmp_path / "splits")
    (tmp_path / "splits" / "train" / "state.json").write_text('{"_data_files": [{"filename": "../x.arrow"}]}')
    assert "expected files of this folder" in one_line(tmp_path / "splits" / "train")
    path = write_jsonl(tmp_path / "d.jsonl", OWN)
    assert "data.format=alpaca needs the columns instruction, output" in one_line(path, form="alpaca")
