"""What is shown as trained are the tokens that are trained."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpcrl import cli
from hpcrl.config.schema import DataConfig
from hpcrl.data.answers import AnswerDataset
from hpcrl.data.supervision import SftDataset, Supervised, Supervision
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.job import TerminalFormatter

TOKENIZER = Path(__file__).parents[2] / "configs" / "tool_tokenizer"
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
TEMPLATE += "{{ eos_token if m.role == 'assistant' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
MESSAGES = [
    {"role": role, "content": content}
    for role, content in zip(["user", "assistant"] * 2, ["2+3?", "5", "[[and]] 4?", "9, I think"], strict=True)
]
TRAINED = re.compile("\u27e6([^\u27e6\u27e7]+)\u27e7")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(TOKENIZER))


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_shown_text_is_that_of_the_trained_ids(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "chat.jsonl", {"messages": MESSAGES})
    cfg = DataConfig(chat_template=TEMPLATE)
    data = SftDataset([path], tokenizer, cfg, messages_key="messages", answer_key="answer", turns="all")
    prompt, response, mask = data.sequence(0)
    sequence = Supervised.of("", prompt, response, mask)
    supervision = Supervision(data.where(0), [sequence], tokenizer)
    stretches = supervision.stretches(sequence)
    assert [it.is_trained for it in stretches] == [False, True, False, True]
    assert "".join(it.text for it in stretches) == tokenizer.decode([*prompt, *response])
    assert "".join(it.text for it in stretches if it.is_trained) == tokenizer.decode(response[mask == 1])
    head, text = supervision.bracketed().split("\n")
    assert head == f"{path}: row 0: 13 of 36 tokens are trained, those in \u27e6\u27e7"
    assert text == "<|bos|>u:2+3?a:\u27e65<|eos|>\u27e7u:[[and]] 4?a:\u27e69, I think<|eos|>\u27e7"


def byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return SimpleNamespace(backend_tokenizer=tokenizer)


def test_text_cannot_be_confused_with_brackets_and_controls_are_shown() -> None:
    ids = np.frombuffer("a\u27e7b\x1b[2J\u00e9".encode(), np.uint8).astype(np.int32)
    mask = np.arange(len(ids)) >= 4
    shown = Supervision("f: row 3", [Supervised("chosen", ids, mask)], byte_tokenizer()).bracketed()
    assert (
        shown
        == "f: row 3: chosen: 7 of 11 tokens are trained, those in \u27e6\u27e7\na<U+27E7>\u27e6b\u241b[2J\u00e9\u27e7"
    )
    none = Supervision("f: row 3", [Supervised("prompt", ids[:1], mask[:1])], byte_tokenizer()).bracketed()
    assert none == "f: row 3: prompt: none of 1 tokens is trained\na"


def test_long_texts_and_many_turns_are_shortened() -> None:
    ids = np.full(9000, ord("x"), np.int32)
    ids[[0, -1]] = ord("("), ord(")")
    supervision = Supervision("f", [Supervised("", ids, np.ones(9000, bool))], byte_tokenizer())
    text = supervision.bracketed().split("\n")[1]
    assert text == f"\u27e6({499 * 'x'}[... 8000 characters left out ...]{499 * 'x'})\u27e7"
    assert supervision.bracketed(full=True).count("x") == 8998
    turns = Supervision("f", [Supervised("", ids, np.arange(9000) // 50 % 2 == 1)], byte_tokenizer()).bracketed()
    assert turns.count("\u27e6") == 21 and "[... 140 stretches left out ...]" in turns


def test_a_picture_is_shown_once() -> None:
    images: Any = SimpleNamespace(vision=SimpleNamespace(image_token_id=ord("P"), video_token_id=ord("V")))
    ids = np.frombuffer(b"<PPP><P>aaVV", np.uint8).astype(np.int32)
    sequence = Supervised("", ids, np.arange(len(ids)) == 8)
    shown = Supervision("f", [sequence], byte_tokenizer(), images).bracketed()
    assert shown.split("\n")[1] == "<P><P>\u27e6a\u27e7aV"


def test_a_terminal_gets_colours_and_a_log_brackets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ids = np.frombuffer(b"q[b]a", np.uint8).astype(np.int32)
    supervision = Supervision("f", [Supervised("", ids, ids == ord("a"))], byte_tokenizer())
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with caplog.at_level("INFO"):
        supervision.log()
    (record,) = caplog.records
    assert record.getMessage().endswith("those in \u27e6\u27e7\nq[b]\u27e6a\u27e7")
    assert TerminalFormatter().format(record).endswith("those on green\n\x1b[2mq[b]\x1b[0m\x1b[30;42ma\x1b[0m")
    monkeypatch.setenv("NO_COLOR", "1")
    assert supervision.coloured() is None


CALL = {"function": {"name": "mul", "arguments": {"x": 3}}}


@pytest.mark.parametrize("part", [{"reasoning": "three fours"}, {"tool_calls": [CALL]}], ids=["reasoning", "calls"])
def test_an_answer_has_no_part_besides_its_content(tmp_path: Path, tokenizer: Any, part: dict[str, Any]) -> None:
    answers = [[{"role": "assistant", "content": "12", **it}] for it in ({}, part)]
    path = write(tmp_path / "pairs.jsonl", {"prompt": "3*4?", "chosen": answers[0], "rejected": answers[1]})
    columns = {"rm.chosen_key": "chosen", "rm.rejected_key": "rejected"}
    with pytest.raises(
        InputError, match=r"row 0: the answer in 'rejected' has .*; move it there, or set data.accept_dro"
    ):
        AnswerDataset([path], tokenizer, DataConfig(), columns)
    data = AnswerDataset([path], tokenizer, DataConfig(accept_dropped_parts=True), columns)
    assert tokenizer.decode(data.answer(0, 1)) == "12<|eos|>"


@pytest.mark.parametrize("answer", ["", " ", "<|eos|>", [{"role": "assistant", "content": ""}]])
def test_an_empty_answer_is_an_error_for_sft_only(tmp_path: Path, tokenizer: Any, answer: Any) -> None:
    """The answer that a model should avoid may be empty."""
    path = write(tmp_path / "answers.jsonl", {"prompt": "3*4?", "answer": "12"}, {"prompt": "5*5?", "answer": answer})
    keys: Any = {"messages_key": "messages", "answer_key": "answer", "turns": "all"}
    with pytest.raises(InputError, match=r"row 1: the answer in 'answer' is empty, .* data.accept_dropped_parts=true"):
        SftDataset([path], tokenizer, DataConfig(), **keys)
    accepted = SftDataset([path], tokenizer, DataConfig(accept_dropped_parts=True), **keys)
    rejected = AnswerDataset([path], tokenizer, DataConfig(), {"preference.rejected_key": "answer"})
    for ids in (accepted.sequence(1)[1], rejected.answer(1)):
        assert tokenizer.decode(ids).strip() == "<|eos|>"


@pytest.fixture
def show(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run `hpcrl data show FILE --row N CONFIG`, and return what it prints."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"model": {"tokenizer": str(TOKENIZER)}, "data": {"chat_template": TEMPLATE}}))

    def command(path: str, row: int, *arguments: str, code: int = 0) -> str:
        monkeypatch.setattr("os._exit", leave)
        with pytest.raises(SystemExit) as caught:
            cli.main(["data", "show", path, "--row", str(row), str(config), *arguments])
        assert caught.value.code == code
        out, err = capfd.readouterr()
        return out if code == 0 else err

    return command


def test_show_prints_one_row_as_the_job_of_its_columns(tmp_path: Path, show: Callable[..., str]) -> None:
    bad = {"messages": "none", "prompt": 1, "chosen": 2, "completion": 3, "answer": 4}  # which is not read
    chat = write(tmp_path / "chat.jsonl", bad, {"messages": MESSAGES})
    assert TRAINED.findall(show(chat, 1)) == ["5<|eos|>", "9, I think<|eos|>"]
    assert TRAINED.findall(show(chat, 1, "sft.assistant_turns=last")) == ["9, I think<|eos|>"]
    answers = write(tmp_path / "answers.jsonl", bad, {"prompt": "2+3?", "answer": "5"})
    assert TRAINED.findall(show(answers, 1, "sft.messages_key=none")) == ["5<|eos|>"]
    prompt = show(answers, 1, "sft.messages_key=none", "sft.answer_key=none")
    assert prompt.splitlines()[0] == f"{answers}: row 1: prompt: none of 5 tokens is trained"
    pair = write(tmp_path / "pairs.jsonl", {"prompt": "2+3?", "chosen": "5", "rejected": "6"})
    assert TRAINED.findall(show(pair, 0)) == ["5<|eos|>", "6<|eos|>"]
    assert TRAINED.findall(show(pair, 0, "preference.loss_type=orpo")) == ["2+3?5<|eos|>", "6<|eos|>"]
    assert "chosen, whose last token has the score: 2 of 7 tokens" in show(pair, 0, "--job=rm")
    label = write(tmp_path / "labels.jsonl", {"prompt": "2+3?", "completion": "6", "label": False})
    assert "row 0: bad answer: 2 of 7 tokens" in show(label, 0, "preference.loss_type=kto")


def test_show_prints_the_line_of_a_bad_row(tmp_path: Path, show: Callable[..., str]) -> None:
    path = write(tmp_path / "chat.jsonl", {"messages": [MESSAGES[0], MESSAGES[1] | {"reasoning": "two and three"}]})
    line = show(path, 0, code=2)
    assert line.startswith(
        f"hpcrl: error: {path}: row 0: message 1: the chat template does not render all of reasoning"
    )
    assert line.count("\n") == 1
    assert "no row 3; it has 1 rows, which are counted from 0" in show(path, 3, code=2)
