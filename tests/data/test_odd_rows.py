"""Rows of odd values: JSON lines and Parquet give the same tokens, or the same line."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hpcrl.config.schema import DataConfig
from hpcrl.data.answers import CHOSEN, REJECTED, AnswerDataset, LabelledDataset
from hpcrl.data.prompts import PromptDataset
from hpcrl.data.supervision import SftDataset
from hpcrl.data.tokenizer import encode_texts
from hpcrl.rewards.registry import check_ground_truth
from hpcrl.runtime.exits import InputError

Row = dict[str, Any]
END = "<|end|>"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}: "
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
UNMARKED = re.sub(r"{% (end)?generation %}", "", TEMPLATE)
ROWS_PER_FILE = 8


def make_tokenizer(model: Any) -> Any:
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens([END])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    tokenizer.chat_template = UNMARKED
    return tokenizer


VOCABULARY = {character: number for number, character in enumerate([*map(chr, range(32, 127)), "\n", "é"])}
TOKENIZERS = {
    "raises": make_tokenizer(models.WordLevel(VOCABULARY, unk_token="none")),  # for a character without a token
    "drops": make_tokenizer(models.BPE(VOCABULARY, [])),
    "replaces": make_tokenizer(models.WordLevel(VOCABULARY | {"?": 63}, unk_token="?")),
}


class OddRows:
    """Draws rows of each kind. Schemas of one file have the same keys: what a Parquet struct cannot hold is no row."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.default = self.one_of([{}, {"default": None}, {"default": 5}])
        self.kind_of_arguments = self.one_of([dict, str])

    def one_of(self, values: list[Any], odd: tuple[Any, ...] = (), share: float = 0.05) -> Any:
        return self.draw.choice(odd if odd and self.draw.random() < share else values)

    def text(self) -> Any:
        rare = ["\ud83d", "日", "😀", "\x00", "é", "x" * 300, f"{END}\n", END * 2]
        pieces = [self.one_of(["", " ", "12", "yes", "{}", '"', "null", "\n", END], tuple(rare)) for _ in range(3)]
        return "".join(pieces)

    def content(self) -> Any:
        return self.one_of([self.text()], (None, "", 5, ["a"], {"a": None}, True))

    def nested(self, depth: int = 2) -> Any:
        """A value in which anything may be null."""
        leaves = {"n": [1, None], "s": [self.text(), None], "l": [[1, None], [], None]}
        found = {name: self.one_of(values) for name, values in leaves.items() if self.draw.random() < 0.7}
        if depth and self.draw.random() < 0.6:
            found["m"] = self.one_of([self.nested(depth - 1), None])
        return found

    def message(self, role: str) -> Row:
        found: Row = {"role": role, "content": self.content()}
        if role == "assistant" and self.draw.random() < 0.4:
            arguments = self.nested()
            call = {"name": "f", "arguments": arguments if self.kind_of_arguments is dict else json.dumps(arguments)}
            found |= {"tool_calls": self.one_of([[{"function": call}], [], None])}
            found["content"] = self.one_of([found["content"], None, ""])
        if self.draw.random() < 0.05:
            del found["content"]
        return found

    def tools(self) -> Any:
        keywords = {"type": "string", "enum": ["a", None], **self.default}
        schemas = [{"name": "f", "parameters": dict.fromkeys(self.draw.sample("abc", 1), keywords)}]
        odd = ("", " ", "[]", "null", "calculator", "{}", "[1]", 5, json.dumps(schemas))
        return self.one_of([None, schemas, []], odd, 0.2)

    def conversations(self) -> Row:
        roles = [*self.one_of([[], ["system"]]), *["user", "assistant"] * self.draw.randint(1, 2)]
        messages = [self.message(role) for role in roles]
        return {"messages": self.one_of([messages], (None, [], "text", [None], messages[1:])), "tools": self.tools()}

    def prompt(self) -> Any:
        messages = [self.message("user")]
        return self.one_of([self.text(), messages, [*messages, self.message("assistant"), *messages]], (None, [], 5))

    def said(self) -> Any:
        return self.one_of([self.text(), [{"role": "assistant", "content": self.text()}]], (None, "", 5, [], [{}]))

    def answers(self) -> Row:
        return {"prompt": self.prompt(), "answer": self.said()}

    def pairs(self) -> Row:
        return {"prompt": self.prompt(), "chosen": self.said(), "rejected": self.said()}

    def labels(self) -> Row:
        label = self.one_of([True, False], (None, 1, "yes", 0.5))
        return {"prompt": self.prompt(), "completion": self.said(), "label": label}

    def prompts(self) -> Row:
        source = self.one_of(["openai/gsm8k", "lighteval/MATH", "numina_x", "countdown", "searchR1_nq"], (None, "", 5))
        truths = ["12", 12, self.text(), {"numbers": [1, 2], "target": 3}, {"target": ["a", "b"]}]
        truth = self.one_of(truths, (None, 1.5, True, [], ["a"], {"target": None}, self.nested()), 0.2)
        return {
            "prompt": self.prompt(),
            "data_source": source,
            "reward_model": self.one_of([{"style": "rule", "ground_truth": truth}], (None, "12", {"style": "rule"})),
            "extra_info": self.one_of([self.nested(), None], ("x", [1], {})),
        }


def test_the_characters_of_special_tokens_need_no_token() -> None:
    tokenizer = make_tokenizer(models.BPE({"a": 0, "b": 1}, []))
    assert encode_texts(tokenizer, [f"ab{END}"], ["here"], False) == [[0, 1, 2]]
    with pytest.raises(InputError, match="here: the tokenizer has no token for 'e' in"):
        encode_texts(tokenizer, [f"ae{END}"], ["here"], False)


def sft_of(path: str, tokenizer: Any, cfg: DataConfig) -> list[Any]:
    data = SftDataset([path], tokenizer, cfg, messages_key="messages", answer_key="answer", turns="all")
    return [[part.tolist() for part in data.sequence(row)] for row in range(len(data))]


def pairs_of(path: str, tokenizer: Any, cfg: DataConfig) -> list[Any]:
    data = AnswerDataset([path], tokenizer, cfg, {"rm.chosen_key": "chosen", "rm.rejected_key": "rejected"})
    return [[part.tolist() for side in (CHOSEN, REJECTED) for part in data.pair(row, side)] for row in range(len(data))]


def labels_of(path: str, tokenizer: Any, cfg: DataConfig) -> list[Any]:
    columns = {"preference.completion_key": "completion"}
    data = LabelledDataset([path], tokenizer, cfg, columns, label=("preference.label_key", "label"))
    return [[[part.tolist() for part in data.pair(row)], bool(data.labels[row])] for row in range(len(data))]


def prompts_of(path: str, tokenizer: Any, cfg: DataConfig) -> list[Any]:
    """Tokens and records, if the rules accept their ground truths."""
    data = PromptDataset([path], tokenizer, cfg)
    for row, (source, truth) in enumerate(data.ground_truths()):
        if source not in ("", "5"):
            check_ground_truth(source, truth, data.where(row))
    return [[data.prompt_ids(row).tolist(), data.record(row)] for row in range(len(data))]


READERS: dict[str, Callable[[str, Any, DataConfig], list[Any]]] = {
    "conversations": sft_of, "answers": sft_of, "pairs": pairs_of, "labels": labels_of, "prompts": prompts_of
}  # fmt: skip


def bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: bare(it) for name, it in value.items() if it is not None}
    return [bare(it) for it in value] if isinstance(value, list) else value


def write(rows: list[Row], stem: Path) -> list[str]:
    """The files of these rows: JSON lines, and Parquet if it can hold their values, but for absent and null keys."""
    jsonl, parquet = str(stem.with_suffix(".jsonl")), str(stem.with_suffix(".parquet"))
    Path(jsonl).write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, parquet)
    except (pyarrow.ArrowException, UnicodeEncodeError, TypeError):
        return [jsonl]
    return [jsonl, parquet] if json.dumps(bare(table.to_pylist())) == json.dumps(bare(rows)) else [jsonl]


def outcome(read: Callable[[], list[Any]]) -> list[Any] | str:
    try:
        return read()
    except InputError as error:
        assert "\n" not in str(error)
        return re.sub(r"\.(jsonl|parquet)\b", "", str(error))


def compare(kind: str, rows: list[Row], stem: Path, tokenizer: Any, cfg: DataConfig) -> Iterator[tuple[bool, bool]]:
    """Whether Parquet held each row, and whether it has tokens. A row whose line was compared is taken away, until the
    others have tokens."""
    while rows:
        files = write(rows, stem)
        if len(files) == 1 and len(rows) > 1:
            for row in rows:
                yield from compare(kind, [row], stem, tokenizer, cfg)
            return
        found, *others = [outcome(lambda path=path: READERS[kind](path, tokenizer, cfg)) for path in files]
        for other in others:
            assert json.dumps(other) == json.dumps(found), rows
        bad = re.search(rf"^{re.escape(str(stem))}: row (\d+)\b", found) if isinstance(found, str) else None
        if bad is None:
            assert not isinstance(found, str) or re.search("empty dataset|no column 'prompt'", found), found
            yield from ((len(files) > 1, isinstance(found, list)) for _ in rows)
            return
        yield len(files) > 1, False
        rows = [row for number, row in enumerate(rows) if number != int(bad[1])]


def compare_files(numbers: range, folder: Path) -> tuple[int, ...]:
    """Numbers of rows, of those in Parquet, and of those with tokens."""
    compared: list[tuple[bool, bool]] = []
    for number in numbers:
        odd, kind = OddRows(number), list(READERS)[number % len(READERS)]
        cfg = DataConfig(
            chat_template=odd.one_of([TEMPLATE, UNMARKED]),
            max_prompt_length=250,
            max_response_length=250,
            truncation=odd.one_of(["error", "right"]),
            filter_overlong_prompts=odd.one_of([True, False]),
        )
        rows = [getattr(odd, kind)() for _ in range(ROWS_PER_FILE)]
        compared += compare(kind, rows, folder / "rows", TOKENIZERS[odd.one_of(list(TOKENIZERS))], cfg)
    return (len(compared), *map(sum, zip(*compared, strict=True)))


def test_json_lines_and_parquet_have_the_same_tokens_or_the_same_line(tmp_path: Path) -> None:
    num_rows, in_parquet, with_tokens = compare_files(range(25), tmp_path)
    assert num_rows == 200 and in_parquet > 140 and with_tokens > 80


@pytest.mark.exhaustive
def test_twenty_thousand_rows(tmp_path: Path) -> None:
    num_rows, in_parquet, with_tokens = compare_files(range(100, 2600), tmp_path)
    print(f"{num_rows} rows, {in_parquet} of them in Parquet too, {with_tokens} with tokens")
    assert num_rows == 20_000 and in_parquet > 14_000 and with_tokens > 8_000
