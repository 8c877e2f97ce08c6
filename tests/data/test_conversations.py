"""Which tokens of a conversation have loss."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.config.schema import DataConfig
from hpcrl.data.conversations import Conversations
from hpcrl.data.sft import SftDataset
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.runtime.exits import InputError

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
