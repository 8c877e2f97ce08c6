"""Which tokens of a conversation have loss."""

from __future__ import annotations

import json
import runpy
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from hpcrl.config.schema import DataConfig
from hpcrl.data.conversations import Conversations
from hpcrl.data.row_file import RowFile
from hpcrl.data.supervision import SftDataset
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.runtime.exits import InputError
from tests.chat_families import FAMILIES

FAMILY = Path(__file__).parents[1] / "algorithms" / "trl_cases" / "sft.py"
CASES = runpy.run_path(str(FAMILY))
RECORDED = np.load(FAMILY.with_suffix(".npz"))
MARKED = CASES["TEMPLATE"]
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
ROWS = CASES["CONVERSATIONS"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(CASES["TOKENIZER"]))


def write(tmp_path: Path, rows: list[Any], name: str = "chat.jsonl") -> str:
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / name)


def read(tmp_path: Path, tokenizer: Any, rows: list[Any], turns: Any = "all", **data: Any) -> Conversations:
    cfg = DataConfig(**{"chat_template": MARKED, "max_prompt_length": 60, "max_response_length": 60, **data})
    return Conversations(write(tmp_path, rows), tokenizer, cfg, "messages", turns)


def labels(data: Conversations, row: int) -> tuple[list[int], list[int]]:
    """Token ids, and those with loss or -100 in their places."""
    prompt, response, mask = data.sequence(row)
    ids = [*prompt.tolist(), *response.tolist()]
    return ids, [-100] * len(prompt) + np.where(mask, response, -100).tolist()


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marks", "differences"])
def test_tokens_and_labels_are_trls(tmp_path: Path, tokenizer: Any, template: str) -> None:
    data = read(tmp_path, tokenizer, ROWS, chat_template=template)
    for row in range(len(ROWS)):
        ids, found = labels(data, row)
        assert ids == RECORDED[f"conversations/ids {row}"].tolist()
        assert found == RECORDED[f"conversations/labels {row}"].tolist()
    assert data.num_endless == 0


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marks", "differences"])
def test_only_the_last_turn(tmp_path: Path, tokenizer: Any, template: str) -> None:
    data = read(tmp_path, tokenizer, ROWS, "last", chat_template=template)
    for row, conversation in enumerate(ROWS):
        _, response, mask = data.sequence(row)
        text = tokenizer.decode(response[mask == 1])
        assert text == conversation["messages"][-1]["content"] + "<|eos|>"


def test_turns_whose_template_changes_earlier_ones(tmp_path: Path, tokenizer: Any) -> None:
    """As Qwen3's, which leaves out the thoughts of earlier turns."""
    loses = "{% for m in messages %}{{ m.role[0] }}:{{ m.content if loop.last or m.role == 'user' else '-' }}"
    loses += "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    loses += "{% if add_generation_prompt %}a:{% endif %}"
    with pytest.raises(InputError, match=r"row 0: with later turns, the chat template renders the conversation up to"):
        read(tmp_path, tokenizer, ROWS, chat_template=loses)
    last = read(tmp_path, tokenizer, ROWS, "last", chat_template=loses)
    assert tokenizer.decode(last.sequence(0)[1]) == "9, I think<|eos|>"
    drops = MARKED.replace("for m in messages", "for m in messages[-2:]")
    with pytest.raises(InputError, match=r"row 0: the chat template marks 1 of 2 assistant's turns"):
        read(tmp_path, tokenizer, ROWS, chat_template=drops)


def test_a_token_over_the_start_of_a_turn(tmp_path: Path, tokenizer: Any) -> None:
    """'{"name": "' is one token of this tokenizer, of which the generation prompt ends with the first characters."""
    joins = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    rows = [{"messages": [{"role": "user", "content": 'call {"na'}, {"role": "assistant", "content": 'me": "x'}]}]
    with pytest.raises(
        InputError, match=r"row 0: the tokenizer joins the start of message 1 with the generation prompt"
    ):
        read(tmp_path, tokenizer, rows, chat_template=joins)


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        ("text", r"row 0: column 'messages' holds 'text'; expected a list of messages"),
        ([{"role": "user", "content": "1"}], r"row 0: the roles in 'messages' are \['user'\]; expected an assistant's"),
        ([{"role": "user"}], r"row 0: column 'messages' holds"),
        ([], r"row 0: the roles in 'messages' are \[\]"),
    ],
)
def test_a_row_that_is_no_conversation(tmp_path: Path, tokenizer: Any, messages: Any, line: str) -> None:
    with pytest.raises(InputError, match=line):
        read(tmp_path, tokenizer, [{"messages": messages}])


def test_conversations_that_are_too_long(tmp_path: Path, tokenizer: Any) -> None:
    short = {"max_prompt_length": 10, "max_response_length": 20}
    with pytest.raises(InputError, match=r"row 0: the conversation has 36 tokens, more than .* = 30"):
        read(tmp_path, tokenizer, ROWS, **short)
    kept = read(tmp_path, tokenizer, ROWS, filter_overlong_prompts=True, **short)
    assert (len(kept), kept.num_filtered) == (1, 3)
    cut = read(tmp_path, tokenizer, ROWS, truncation="right", **short)
    assert cut.lengths().tolist() == [30, 30, 10]  # the second is left out: its answer begins after 30 tokens
    assert (cut.num_filtered, cut.num_endless) == (1, 2)


def test_files_of_both_kinds(tmp_path: Path, tokenizer: Any) -> None:
    answers = [{"prompt": "2+3?", "answer": "5"}, {"prompt": "7", "answer": "8"}]
    files = [write(tmp_path, ROWS), write(tmp_path, answers, "answers.jsonl"), write(tmp_path, ROWS[:2], "more.jsonl")]
    cfg = DataConfig(chat_template=MARKED, max_prompt_length=60, max_response_length=60)
    options: dict[str, Any] = {"messages_key": "messages", "answer_key": "answer", "turns": "all"}
    data = SftDataset(files, tokenizer, cfg, **options)
    assert data.file_sizes == [4, 2, 2]
    texts = [tokenizer.decode(data.sequence(row)[1]) for row in range(len(data))]
    assert texts[3:6] == ["2<|eos|> ", "5<|eos|>", "8<|eos|>"]
    assert texts[6:] == texts[:2]
    assert data.lengths().tolist() == [sum(map(len, data.sequence(row)[:2])) for row in range(8)]
    first = SftDataset(files, tokenizer, cfg, **options, max_samples=5)
    assert first.file_sizes == [4, 1]


CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}{% if m.role == 'assistant' %}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def calls(arguments: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    schema = {"name": "f", "parameters": {"properties": parameters}}
    return {"messages": [{"role": "user", "content": "go"}, called, *ROWS[0]["messages"][-1:]], "tools": [schema]}


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}", "f:city=Bonn;"),
        ("{{ call.function.arguments | tojson }}", 'f:{"city": "Bonn"}'),
        ("{{ '' + call.function.arguments }}", 'f:{"city":"Bonn"}'),  # only text can be joined
    ],
)
def test_arguments_that_are_json_text(tmp_path: Path, tokenizer: Any, template: str, said: str) -> None:
    """OpenAI's API has them so; most templates take a mapping."""
    found = []
    for arguments in ('{"city":"Bonn"}', {"city": "Bonn"}):
        rows = [calls(arguments, {})]
        cfg = {"chat_template": CALLS.replace("{{ call | tojson }}", "f:" + template), "max_prompt_length": 200}
        with suppress(InputError):  # the mapping cannot be joined
            data = read(tmp_path, tokenizer, rows, **cfg)
            found.append([part.tolist() for part in data.sequence(0)])
    assert f"{said}<|eos|>" in tokenizer.decode(found[0][1])
    assert found[1:] in ([], found[:1])
    data = read(tmp_path, tokenizer, [calls("to Bonn", {})], **{**cfg, "chat_template": CALLS})
    assert '"arguments": "to Bonn"' in tokenizer.decode(data.sequence(0)[1])


def test_a_parquet_row_has_no_keys_of_other_rows(tmp_path: Path, tokenizer: Any) -> None:
    """In a struct each row has the keys of all. A null that a schema means, and those in lists, stay."""
    unit = {"enum": ["C", None], "default": None}
    rows = [
        calls({"city": "Bonn", "days": [1, None]}, {"city": {"type": "string"}, "unit": unit}),
        calls({"a": 3, "b": {"c": None, "d": 4}}, {"a": {"default": 2}, "b": {"required": True}}),
        calls({"a": 4}, {"a": {"default": 3}}),
    ]
    cfg = DataConfig(chat_template=CALLS, max_prompt_length=200, max_response_length=200)
    parquet = str(tmp_path / "chat.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet)
    texts = []
    for path in (write(tmp_path, rows), parquet):
        data = Conversations(path, tokenizer, cfg, "messages", "all")
        texts.append([tokenizer.decode(np.concatenate(data.sequence(row)[:2])) for row in range(len(rows))])
    assert texts[0] == texts[1]
    assert '{"city": {"type": "string"}, "unit": {"enum": ["C", null], "default": null}}' in texts[1][0]
    assert 'a:{"function": {"name": "f", "arguments": {"city": "Bonn", "days": [1, null]}}}<|eos|>' in texts[1][0]
    assert '{"a": {"default": 2}, "b": {"required": true}}' in texts[1][1]
    assert '"arguments": {"a": 3, "b": {"d": 4}}' in texts[1][1]
    assert '"arguments": {"a": 4}' in texts[1][2]


def test_a_parquet_map_is_a_mapping(tmp_path: Path, tokenizer: Any) -> None:
    text = pyarrow.map_(pyarrow.string(), pyarrow.string())
    rows = [{"args": [[("b", "1"), ("a", None)], []]}]
    table = pyarrow.Table.from_pylist(rows, pyarrow.schema([("args", pyarrow.list_(text))]))
    pyarrow.parquet.write_table(table, tmp_path / "maps.parquet")
    file = RowFile(str(tmp_path / "maps.parquet"))
    assert file[0] == {"args": [{"b": "1"}, {}]} and file.column("args") == [[{"b": "1"}, {}]]


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ("", None),
        (" \n", None),
        ("null", None),
        ([], None),
        ('[{"name": "f", "strict": null}]', '[{"name": "f", "strict": null}]'),
        ("weather", r"row 1: column 'tools' holds 'weather'; expected a list of JSON schemas, or its JSON text"),
        ('{"name": "f"}', r"row 1: column 'tools' holds"),
        (["weather"], r"row 1: column 'tools' holds"),
        (7, r"row 1: column 'tools' holds '7'"),
        ('[{"name": "\\ud83d"}]', r"row 1: found half of a surrogate pair, '\\ud83d', after '\[\{\"name\": \"'"),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_tools(tmp_path: Path, tokenizer: Any, tools: Any, said: str | None, suffix: str) -> None:
    rows = [ROWS[0] | {"tools": given} for given in (None, tools)]
    path = write(tmp_path, rows)
    if suffix == "parquet":
        path = str(tmp_path / "chat.parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    cfg = DataConfig(chat_template=CALLS, max_prompt_length=60, max_response_length=60)
    if said is not None and said.startswith("row"):
        with pytest.raises(InputError, match=said):
            Conversations(path, tokenizer, cfg, "messages", "all")
        return
    data = Conversations(path, tokenizer, cfg, "messages", "all")
    without, found = (tokenizer.decode(np.concatenate(data.sequence(row)[:2])) for row in range(2))
    assert found == (said or "") + without


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marks", "differences"])
@pytest.mark.parametrize("character", ["é", "\ud83d"])
def test_a_character_without_a_token(tmp_path: Path, template: str, character: str) -> None:
    tokenizer = load_tokenizer(str(Path(__file__).parents[2] / "configs" / "tool_tokenizer"))
    rows = [{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": f"x{character}"}]}]
    line = "half of a surrogate pair" if character == "\ud83d" else "the tokenizer cannot encode"
    with pytest.raises(InputError, match=rf"chat.jsonl: row 0: .*{line}"):
        read(tmp_path, tokenizer, rows, chat_template=template)


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marks", "differences"])
def test_an_end_that_the_content_has_too_is_trained_once(tmp_path: Path, tokenizer: Any, template: str) -> None:
    written = [*ROWS[0]["messages"]]
    for number, end in ((1, "<|eos|>"), (3, "<|eos|>\n<|eos|> ")):
        written[number] = written[number] | {"content": written[number]["content"] + end}
    data = read(tmp_path, tokenizer, [ROWS[0], {"messages": written}], chat_template=template)
    assert labels(data, 0) == labels(data, 1)
    alone = template.replace(" + eos_token", "")  # the template adds none
    data = read(tmp_path, tokenizer, [{"messages": written}], chat_template=alone)
    _, response, mask = data.sequence(0)
    assert tokenizer.decode(response[mask == 1]) == "5<|eos|>9, I think<|eos|>" and data.num_endless == 0


def spoken(tokenizer: Any, data: Conversations) -> list[str]:
    """The trained stretches of the first conversation."""
    prompt, response, mask = data.sequence(0)
    pieces = np.split(response, np.flatnonzero(np.diff(mask)) + 1)
    return [tokenizer.decode(piece) for piece in pieces[::2]]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_model_of_a_family_writes_is_trained(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    tokenizer = family.tokenizer(tmp_path)
    rows = [{"messages": family.conversation()}]
    wide = {"chat_template": None, "max_prompt_length": 999, "max_response_length": 999}
    data = read(tmp_path, tokenizer, rows, **wide)
    assert spoken(tokenizer, data) == list(family.trained) and data.num_endless == 0
    last = read(tmp_path, tokenizer, rows, "last", **wide)
    assert spoken(tokenizer, last) == [family.trained[-1]] and last.num_endless == 0


@pytest.mark.parametrize(
    ("name", "thoughts", "found"),
    [
        ("qwen3.5", ["t1", "t2"], r"'one<\|im_end\|>.* in place of '<think>\\nt1.*kwargs.preserve_thinking=true"),
        ("glm-4.5", ["t1", "t2"], r"'</think>\\none<\|user\|>.*kwargs.clear_thinking=false"),
        ("gpt-oss", ["t1", "t2"], r"'final<\|message\|>one.* in place of 'analysis<\|message\|>t1"),
        ("minimax-m2", [None, "t2"], r"prompt before message 1 ends with '<think>\\n', which the chat template leaves"),
        ("qwen3.5", [None], r"the tokenizer joins the start of message 1 .*, or set .*kwargs.enable_thinking=false"),
        # The model ends an answer by <|return|>, so that <|end|> is not trained.
        ("gpt-oss", [None, None], [f"<|channel|>final<|message|>{text}" for text in ("one", "two<|return|>")]),
        ("glm-4.5", [None, None], [f"\n<think></think>\n{text}<|user|>" for text in ("one", "two")]),
        ("kimi-k2", [None, None], ["one<|im_end|>", "two<|im_end|>"]),
    ],
)  # fmt: skip
def test_answers_to_several_users(tmp_path: Path, name: str, thoughts: list[str | None], found: Any) -> None:
    family = FAMILIES[name]
    tokenizer = family.tokenizer(tmp_path)
    messages: list[dict[str, str]] = []
    for thought, text in zip(thoughts, ("one", "two"), strict=False):
        reasoning = {str(family.thought): thought} if thought else {}
        messages += [{"role": "user", "content": "?"}, {"role": "assistant", "content": text, **reasoning}]
    if isinstance(found, str):
        with pytest.raises(InputError, match=found):
            read(tmp_path, tokenizer, [{"messages": messages}], chat_template=None)
    else:
        data = read(tmp_path, tokenizer, [{"messages": messages}], chat_template=None)
        assert spoken(tokenizer, data) == found


@pytest.mark.parametrize("name", ["qwen3.5", "glm-4.5"])
def test_reasoning_that_a_template_keeps_on_request(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    tokenizer, turns = family.tokenizer(tmp_path), ("one", "two")
    messages: list[dict[str, str]] = []
    for text in turns:
        reasoning = {str(family.thought): f"so {text}"}
        messages += [{"role": "user", "content": "?"}, {"role": "assistant", "content": text, **reasoning}]
    options = {"preserve_thinking": True, "clear_thinking": False}
    rows = [{"messages": messages}]
    data = read(tmp_path, tokenizer, rows, chat_template=None, apply_chat_template_kwargs=options)
    assert all(f"so {text}" in it for text, it in zip(turns, spoken(tokenizer, data), strict=True))
