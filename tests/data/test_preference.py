"""Preference pairs: text or messages, and what a wrong row says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.config.schema import DataConfig
from hpcrl.data.answers import CHOSEN, REJECTED, AnswerDataset
from hpcrl.runtime.exits import InputError

USER = {"role": "user", "content": "1 2 3:"}


def said(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def make(tmp_path: Path, tokenizer: Any, *rows: dict[str, Any], **options: Any) -> AnswerDataset:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {f"rm.{side}_key": options.pop(f"{side}_key", side) for side in ("chosen", "rejected")}
    return AnswerDataset([str(path)], tokenizer, DataConfig(**options), columns)


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ("<a>1+2</a>", "2"),
        ([said("<a>1+2</a>")], [said("2")]),
        ([USER, said("<a>1+2</a>")], [{**USER, "name": None}, said("2")]),  # Parquet fills in absent fields
    ],
    ids=["text", "answers", "conversations"],
)
def test_text_and_messages_are_the_same_pair(tmp_path: Path, tokenizer: Any, chosen: Any, rejected: Any) -> None:
    """Each answer is what a policy would write after the prompt: its text, and the end of the sequence."""
    data = make(tmp_path, tokenizer, {"prompt": [USER], "chosen": chosen, "rejected": rejected})
    for side, text in ((CHOSEN, "<a>1+2</a>"), (REJECTED, "2")):
        sequence = np.concatenate(data.pair(0, side))
        assert sequence.dtype == np.int32
        assert tokenizer.decode(sequence.tolist()) == f"<|bos|>1 2 3:{text}<|eos|>"
        assert data.lengths(side).tolist() == [len(sequence)]


def test_other_columns_and_equal_answers(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "1", "good": "11", "bad": other} for other in ("12", "11", "21")]
    data = make(tmp_path, tokenizer, *rows, chosen_key="good", rejected_key="bad")
    assert (len(data), data.num_equal) == (3, 1)
    cut = make(
        tmp_path,
        tokenizer,
        *rows,
        chosen_key="good",
        rejected_key="bad",
        max_response_length=1,
        truncation="right",
    )
    assert cut.pair(2, REJECTED)[1].tolist() == tokenizer("2", add_special_tokens=False)["input_ids"]
    assert cut.num_equal == 2


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"rejected": "1"}, "no column 'chosen'; it has prompt, rejected; .* rm.chosen_key"),
        ({"chosen": "1", "rejected": 2}, "column 'rejected' holds '2'; .* rm.rejected_key"),
        ({"chosen": [USER], "rejected": "1"}, "column 'chosen' holds"),
        ({"chosen": [{**USER, "content": "4:"}, said("1")], "rejected": "1"}, "before the answer differ from"),
        ({"chosen": "1" * 20, "rejected": "1"}, "answer in 'chosen' has 21 tokens .*max_response_length=18"),
    ],
)
def test_wrong_rows_are_one_line(tmp_path: Path, tokenizer: Any, row: dict[str, Any], line: str) -> None:
    good = {"prompt": [USER], "chosen": "1", "rejected": "2"}
    with pytest.raises(InputError, match=f"pairs.jsonl: row 1: .*{line}") as caught:
        make(tmp_path, tokenizer, good, {"prompt": [USER], **row}, max_response_length=18)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("end", ["<|eos|>", "<|eos|> \n", "<|eos|><|eos|>", "<|eos|>\n<|eos|>"])
def test_an_answer_that_ends_with_the_end_token_is_trained_with_one(tmp_path: Path, tokenizer: Any, end: str) -> None:
    rows = [{"prompt": [USER], "chosen": "1<|eos|>2", "rejected": "2"}]
    rows += [{"prompt": [USER], "chosen": rows[0]["chosen"] + end, "rejected": [said("2" + end)]}]
    data = make(tmp_path, tokenizer, *rows)
    for side in (CHOSEN, REJECTED):
        assert data.answer(1, side).tolist() == data.answer(0, side).tolist()
        assert data.answer(1, side)[-2:].tolist().count(tokenizer.eos_token_id) == 1


def test_a_call_before_the_answer_needs_no_content(tmp_path: Path, tokenizer: Any) -> None:
    """As in messages of OpenAI's API; the prompt and the pair may write it differently."""
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    row = {"prompt": [USER, call, USER], "chosen": [USER, call | {"content": None}, USER, said("1")], "rejected": "2"}
    data = make(tmp_path, tokenizer, row)
    assert tokenizer.decode(data.pair(0)[0]) == "<|bos|>1 2 3:<|eos|>1 2 3:"
