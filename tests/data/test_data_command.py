"""`hpcrl data`: published formats become rows that jobs read and rules score; what is wrong is one line."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.parquet
import pytest

from hpcrl import cli, data
from hpcrl.config.schema import DataConfig
from hpcrl.data import downloaded, drawn, source
from hpcrl.data.answers import AnswerDataset
from hpcrl.data.conversations import Conversations
from hpcrl.data.prompts import PromptDataset
from hpcrl.data.source import all_sources
from hpcrl.rewards.registry import scorer_for
from tests.data.published import PUBLISHED, SHOPS, preference_row, shop_rows, write_jsonl, write_parquet
from tests.geometry import picture

Run = Callable[..., str]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `hpcrl data ...`, which ends with `code`, and return what it prints."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    def command(*arguments: Any, code: int = 0) -> str:
        monkeypatch.setattr("os._exit", leave)
        with pytest.raises(SystemExit) as caught:
            cli.main(["data", *map(str, arguments)])
        out, err = capfd.readouterr()
        assert caught.value.code == code, err
        if code == 2:
            assert out == "" and err.startswith("hpcrl: error: ") and err.count("\n") == 1
        return out + err

    return command


@pytest.fixture(scope="module")
def byte_tokenizer() -> Any:
    """Any text can be tokenised: one token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: number for number, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=template)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return pyarrow.parquet.read_table(path).to_pylist()


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_files_become_rows_that_jobs_read(case: str, tmp_path: Path, run: Run, byte_tokenizer: Any) -> None:
    name, publish, sizes, dropped = PUBLISHED[case]
    publish(tmp_path / "from")
    out, again = tmp_path / "from" / "out", tmp_path / "again"  # a folder to write may be below the one to read
    printed = run(name, "--from", tmp_path / "from", "--out", out)
    run(name, "--from", tmp_path / "from", "--out", out)
    run(name, "--from", tmp_path / "from", "--out", again)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in again.iterdir()
    }
    said = json.loads((out / "dataset.json").read_text())
    assert tuple(said["splits"][split]["rows"] for split in ("train", "val")) == sizes
    assert said["splits"]["train"]["dropped"] == dropped
    assert all(re.search(rf"{count}  {re.escape(reason)}", printed) for reason, count in dropped.items())
    assert said["val_is_held_out_of_train"] == (case == "countdown")
    assert said["duplicates"]["val_rows"] == {"exact": 0, "near": 0}, said["duplicates"]["examples"]

    # a language model does not take the rows with their pictures
    cfg = DataConfig(max_prompt_length=1000, max_response_length=1000, image_key="none")
    for split, size in zip(("train", "val"), sizes, strict=True):
        path = out / f"{split}.parquet"
        rows = rows_of(path)
        assert len(PromptDataset([str(path)], byte_tokenizer, cfg)) == len(rows) == size
        columns = {f"{column}_key": column for column in ("answer", "chosen", "rejected") if column in rows[0]}
        if columns:
            answers = AnswerDataset([str(path)], byte_tokenizer, cfg, columns)
            for side, column in enumerate(columns.values()):
                ids = answers.pair(0, side)[1]
                assert byte_tokenizer.decode(ids[:-1].tolist()) == rows[0][column]
        if "messages" in rows[0]:
            conversations = Conversations(str(path), byte_tokenizer, cfg, "messages", "last")
            last = rows[0]["messages"][-1]["content"]
            assert byte_tokenizer.decode(conversations.sequence(0)[1].tolist()) == f"assistant: {last}\n"
        for row in rows:
            assert row["extra_info"]["split"] == split
            if row["reward_model"]["style"] == "rule":
                assert gold_score(row) == 1.0


def score(row: dict[str, Any], answer: str) -> float:
    source = row["data_source"]
    found = scorer_for(source)(source, answer, row["reward_model"]["ground_truth"])
    return found["score"] if isinstance(found, dict) else found


def gold_score(row: dict[str, Any]) -> float:
    """The score of the row's answer, or of one that follows from the way in which tests/data/published.py made it."""
    if "answer" in row:
        return score(row, row["answer"])
    truth = row["reward_model"]["ground_truth"]
    if row["data_source"] == "math_dapo":
        return score(row, f"It is so.\nAnswer: {truth}")
    if row["data_source"] == "hiyouga/geometry3k":
        return score(row, f"<think>so</think> \\boxed{{{truth}}}")
    one, two, large = sorted(truth["numbers"])
    expression = f"{large} + {two} + {one}" if truth["target"] > large else f"{large} + {one} - {two}"
    return score(row, f"<think>so</think> <answer>{expression}</answer>")


def test_rows_are_those_of_verl(tmp_path: Path, run: Run) -> None:
    PUBLISHED["gsm8k_parquet"][1](tmp_path / "from")
    run("gsm8k", "--from", tmp_path / "from", "--out", tmp_path / "out")
    instruction = 'Let\'s think step by step and output the final answer after "####".'
    assert rows_of(tmp_path / "out" / "train.parquet")[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{SHOPS[1][0]} {instruction}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "5000"},
        "extra_info": {"split": "train", "index": 1},
        "answer": "We count <<1+1=2>> it.\n#### 5,000",
    }


def test_rows_with_pictures_are_those_of_verl(tmp_path: Path, run: Run) -> None:
    """What verl's examples/data_preprocess/geo3k.py writes."""
    PUBLISHED["geometry3k"][1](tmp_path / "from")
    run("geometry3k", "--from", tmp_path / "from", "--out", tmp_path / "out")
    instruction = (
        "You FIRST think about the reasoning process as an internal monologue and then provide the final answer. "
        "The reasoning process MUST BE enclosed within <think> </think> tags. "
        "The final answer MUST BE put in \\boxed{}."
    )
    assert rows_of(tmp_path / "out" / "val.parquet") == [
        {
            "data_source": "hiyouga/geometry3k",
            "prompt": [{"role": "user", "content": f"<image>Find x. {instruction}"}],
            "images": [picture(9)],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "5"},
            "extra_info": {"split": "val", "index": 0, "answer": "5", "question": "<image>Find x."},
        }
    ]


def test_held_out_numbers_are_in_no_training_row(tmp_path: Path, run: Run) -> None:
    """Neither in another order nor with another target; another seed holds out other ones."""
    PUBLISHED["countdown"][1](tmp_path / "from")
    held_out = []
    for seed in (0, 1):
        out = tmp_path / str(seed)
        run("countdown", "--from", tmp_path / "from", "--out", out, "--val-rows", 20, "--seed", seed)
        train, val = (
            {tuple(sorted(row["reward_model"]["ground_truth"]["numbers"])) for row in rows_of(out / f"{split}.parquet")}
            for split in ("train", "val")
        )
        assert len(val) == 10 and len(train) == 30 and not train & val
        held_out.append(val)
    assert held_out[0] != held_out[1]


@pytest.mark.parametrize("name", ["sums", "countdown_words"])
def test_drawn_rows_score_one_and_are_different_problems(name: str, tmp_path: Path, run: Run) -> None:
    run(name, "--out", tmp_path / "a", "--rows", 500, "--val-rows", 50, "--seed", 3)
    run(name, "--out", tmp_path / "b", "--rows", 100, "--val-rows", 50, "--seed", 3)
    assert (tmp_path / "a" / "val.parquet").read_bytes() == (tmp_path / "b" / "val.parquet").read_bytes()
    rows = [row for split in ("train", "val") for row in rows_of(tmp_path / "a" / f"{split}.parquet")]
    problems = [row["extra_info"].get("operands") or row["reward_model"]["ground_truth"]["numbers"] for row in rows]
    assert len({tuple(sorted(numbers)) for numbers in problems}) == len(rows) == 550
    assert all(gold_score(row) == 1.0 for row in rows)
    assert not any(score(row, "1") for row in rows)


def test_thoughts_of_drawn_countdown_are_right(tmp_path: Path, run: Run) -> None:
    run("countdown_words", "--out", tmp_path, "--rows", 300)
    for row in rows_of(tmp_path / "train.parquet"):
        target = row["reward_model"]["ground_truth"]["target"]
        assert f" to make {target}. " in row["prompt"][0]["content"]
        *tries, last = re.findall(r"I try (.*?)\. This is (not )?(\d+)", row["answer"])
        assert not last[1] and all(negated for _, negated, _ in tries)
        for steps, negated, of in [*tries, last]:
            results = []
            for left, sign, right, result in re.findall(r"(-?\d+) ([-+*]) (\d+) = (-?\d+)", steps):
                value = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[sign](int(left), int(right))
                assert value == int(result) and (not results or results[-1] == int(left))
                results.append(value)
            assert (results[-1] != target) == bool(negated) and int(of) == target


def test_duplicates_are_reported_and_dropped(tmp_path: Path, run: Run) -> None:
    equal = (SHOPS[3][0].upper().replace(" ", "  "), 7)
    near = ("There are 12 eggs in a box and Cleo breaks 6 of them. How many eggs are whole?", 6)
    write_jsonl(tmp_path / "from" / "train.jsonl", shop_rows([*SHOPS[:3], equal, near]))
    write_jsonl(tmp_path / "from" / "test.jsonl", shop_rows([SHOPS[3], ("How many legs do two dogs have?", 8)]))
    printed = run("gsm8k", "--from", tmp_path / "from", "--out", tmp_path / "out")
    assert "exactly: 1, in 1 training rows" in printed and "nearly, at 0.5: 0, in 1 training rows" in printed
    assert "1.000 train THERE ARE 12 EGGS" in printed
    files = ["--train", tmp_path / "out" / "train.parquet", "--val", tmp_path / "out" / "val.parquet"]
    assert "exactly: 1, in 1 training rows" in run("check", *files, code=1)

    run("gsm8k", "--from", tmp_path / "from", "--out", tmp_path / "out", "--drop-duplicates")
    said = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert said["splits"]["train"]["dropped"] == {"is a duplicate of a validation prompt": 2}
    assert said["duplicates"]["train_rows"] == {"exact": 1, "near": 1}
    assert [row["extra_info"]["index"] for row in rows_of(tmp_path / "out" / "train.parquet")] == [0, 1, 2]
    assert "exactly: 0, in 0 training rows" in run("check", *files)


def test_problems_with_the_same_numbers_are_duplicates(tmp_path: Path, run: Run) -> None:
    """Of countdown, whose prompts are all alike."""
    write_jsonl(tmp_path / "train.jsonl", [{"target": 10, "nums": [1, 2, 7]}, {"target": 10, "nums": [1, 2, 8]}])
    write_jsonl(tmp_path / "test.jsonl", [{"target": 4, "nums": [7, 1, 2]}])
    printed = run("countdown", "--from", tmp_path, "--out", tmp_path / "out", "--drop-duplicates")
    assert "validation problems in the training data, exactly: 1, in 1 training rows" in printed
    assert [row["reward_model"]["ground_truth"]["numbers"] for row in rows_of(tmp_path / "out" / "train.parquet")] == [
        [1, 2, 8]
    ]


def test_check_reads_plain_prompts_of_several_files(tmp_path: Path, run: Run) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "One long question about rivers in France"}])
    write_jsonl(tmp_path / "b.jsonl", [{"text": "Another one"}, {"text": "another  ONE"}])
    write_parquet(tmp_path / "c.parquet", [{"text": [{"role": "user", "content": "another one"}]}])
    files = ["--train", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--val", tmp_path / "c.parquet"]
    printed = run("check", *files, "--prompt-key", "text", code=1)
    assert "3 training rows, 1 validation rows" in printed
    assert "exactly: 1, in 2 training rows" in printed and "nearly, at 0.5: 0, in 0" in printed


def spoil_nothing(folder: Path) -> None:
    folder.mkdir()


def broken_line(folder: Path) -> None:
    write_jsonl(folder / "train.jsonl", shop_rows(SHOPS))
    with open(folder / "train.jsonl", "a") as file:
        file.write('{"question": "How\n')


def other_columns(folder: Path) -> None:
    write_parquet(folder / "train.parquet", [{"text": "a"}])


def equal_sides(folder: Path) -> None:
    write_parquet(folder / "train.parquet", [preference_row("Which?", "this", "this")] * 3)


def with_thoughts(folder: Path) -> None:
    chat = [{"role": "user", "content": "3*4?"}, {"role": "assistant", "content": "12", "reasoning": "fours"}]
    write_jsonl(folder / "train.jsonl", [{"messages": chat}] * 2)


def one_side(folder: Path) -> None:
    rows = [preference_row("Which?", "this", "this"), preference_row("Why?", "so", "")]
    for row in rows:
        del row["rejected"]
    write_jsonl(folder / "train.jsonl", rows)


def no_parquet(folder: Path) -> None:
    folder.mkdir()
    (folder / "train.parquet").write_text("no")


def pointer(folder: Path) -> None:
    folder.mkdir()
    (folder / "train.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 446564\n")


@pytest.mark.parametrize(
    ("name", "publish", "options", "line"),
    [
        ("gsm8k", spoil_nothing, (), r"no files of gsm8k; looked below it for main/train-\*.parquet \(and main/test-"),
        ("gsm8k", lambda folder: None, (), "from: no such folder; expected a folder with the files of gsm8k"),
        ("gsm8k", broken_line, (), r"train.jsonl:5: not JSON .* expected one JSON object per line"),
        ("gsm8k", other_columns, (), "train.parquet: row 0: no column 'question'; it has text"),
        ("gsm8k", pointer, (), "train.parquet: found a pointer of Git LFS; .* run git lfs pull"),
        ("gsm8k", no_parquet, (), "train.parquet: not a readable Parquet file"),
        ("gsm8k", PUBLISHED["gsm8k_jsonl"][1], ("--val-rows", "2"), "test.jsonl has the validation rows of gsm8k"),
        ("preferences", equal_sides, (), r"none of 3 rows can be used: chosen and rejected are equal \(3\)"),
        ("preferences", one_side, (), "train.jsonl:1: no column 'rejected'"),
        ("chat", with_thoughts, (), r"used: thoughts or tool calls beside the text in messages \(2\)"),
        ("chat", equal_sides, (), "no column 'messages'; it has prompt, prompt_id, chosen"),
        (
            "countdown",
            PUBLISHED["countdown"][1],
            ("--val-rows", "80"),
            "80 rows of 40 problems; hold out fewer",
        ),
        ("chat", PUBLISHED["chat"][1], ("--threshold", "2"), "found 2; expected above 0, at most 1"),
    ],
)
def test_bad_input_is_one_line(
    name: str, publish: Callable[[Path], None], options: tuple[str, ...], line: str, tmp_path: Path, run: Run
) -> None:
    publish(tmp_path / "from")
    assert re.search(line, run(name, "--from", tmp_path / "from", "--out", tmp_path / "out", *options, code=2))
    assert not (tmp_path / "out").exists()


def test_files_of_others_stay(tmp_path: Path, run: Run) -> None:
    write_jsonl(tmp_path / "train.jsonl", shop_rows(SHOPS))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "val.parquet").write_text("mine")
    assert "exists without dataset.json" in run("gsm8k", "--from", tmp_path, "--out", tmp_path / "out", code=2)
    assert [path.read_text() for path in (tmp_path / "out").iterdir()] == ["mine"]
    assert "is the folder of --from, too" in run("gsm8k", "--from", tmp_path, "--out", tmp_path, code=2)
    assert "found 4950 different problems" in run("sums", "--out", tmp_path / "s", "--rows", 5000, code=2)


def test_two_datasets_of_one_name_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all_sources()["gsm8k"] == downloaded.SOURCES["gsm8k"]
    monkeypatch.setitem(drawn.SOURCES, "gsm8k", drawn.SOURCES["sums"])
    with pytest.raises(ValueError, match=r"drawn\.py: another file has the datasets gsm8k, too"):
        all_sources()


def test_a_file_of_a_user_declares_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sources").mkdir()
    own = "from hpcrl.data import drawn\nSOURCES = {'shop': drawn.SOURCES['sums']}\n"
    (tmp_path / "sources" / "shop.py").write_text(own)
    monkeypatch.setattr(source, "FOLDER", tmp_path)
    monkeypatch.setattr(data, "__path__", [*data.__path__, str(tmp_path)])
    with patch.dict(sys.modules):
        sys.modules.pop("hpcrl.data.sources", None)
        assert all_sources()["shop"] == drawn.SOURCES["sums"]
