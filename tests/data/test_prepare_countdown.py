"""The countdown files: disjoint problems, deterministic, and every answer scores 1."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet
import pytest

from hpcrl.config.schema import DataConfig
from hpcrl.data.answers import AnswerDataset
from hpcrl.data.prompts import PromptDataset

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tool: Callable[[str], ModuleType]) -> Path:
    out = tmp_path_factory.mktemp("countdown")
    tool("prepare_countdown").main(
        ["--out", str(out), "--sft-rows", "2000", "--preference-rows", "2000", "--seed", "3"]
    )
    return out


@pytest.fixture(scope="module")
def files(folder: Path) -> dict[str, Rows]:
    return {
        name: pyarrow.parquet.read_table(folder / f"{name}.parquet").to_pylist() for name in ("train", "val", "sft")
    }


def _problem(row: dict[str, Any]) -> tuple[tuple[int, ...], int]:
    truth = row["reward_model"]["ground_truth"]
    return tuple(sorted(truth["numbers"])), truth["target"]


@pytest.mark.parametrize("names", [("train", "val", "sft"), ("preference",), ("sft_tool", "val", "labelled_val")])
def test_a_file_is_the_same_without_the_others(
    folder: Path, tmp_path: Path, tool: Callable, names: tuple[str, ...]
) -> None:
    arguments = ["--sft-rows", "2000", "--preference-rows", "2000", "--seed", "3", "--files", *names]
    tool("prepare_countdown").main(["--out", str(tmp_path), *arguments])
    written = {path.stem: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {name: (folder / f"{name}.parquet").read_bytes() for name in names}


def test_sizes_and_disjoint_problems(files: dict[str, Rows]) -> None:
    problems = {name: {_problem(row) for row in rows} for name, rows in files.items()}
    assert (len(files["train"]), len(files["val"]), len(files["sft"])) == (2186, 531, 2000)
    assert len(problems["train"]) == 2186 and len(problems["val"]) == 531
    assert not problems["val"] & (problems["train"] | problems["sft"])
    assert problems["sft"] <= problems["train"]


def test_rows_say_what_the_prompt_says(files: dict[str, Rows]) -> None:
    for split, rows in files.items():
        for index, row in enumerate(rows):
            truth = row["reward_model"]["ground_truth"]
            assert row["prompt"] == [
                {"role": "user", "content": " ".join(map(str, [*truth["numbers"], truth["target"]])) + ":"}
            ]
            assert len(truth["numbers"]) == 4 and set(truth["numbers"]) <= set(range(1, 10))
            assert 1 <= truth["target"] <= 36
            assert row["extra_info"] == {"index": index, "split": split}
            assert row["data_source"] == "countdown"


def test_answers_score_one_and_keep_the_draw_order_open(files: dict[str, Rows]) -> None:
    from hpcrl.rewards.scorers.countdown import compute_score

    for row in files["sft"]:
        assert compute_score("countdown", row["answer"], row["reward_model"]["ground_truth"])["score"] == 1.0
    # Answers in the prompt's order would teach copying: about 1 in 24 is there by chance.
    same = sum(
        [int(c) for c in row["answer"] if c.isdigit()] == row["reward_model"]["ground_truth"]["numbers"]
        for row in files["sft"]
    )
    assert same < 0.12 * len(files["sft"])


def test_preferences_are_right_over_wrong(folder: Path, files: dict[str, Rows]) -> None:
    from hpcrl.rewards.scorers.countdown import compute_score

    kinds = set()
    for name, labelled, size in (("preference", "labelled", 2000), ("preference_val", "labelled_val", 100)):
        rows = pyarrow.parquet.read_table(folder / f"{name}.parquet").to_pylist()
        assert len(rows) == size
        for row in rows:
            truth = row["reward_model"]["ground_truth"]
            score = lambda text, truth=truth: compute_score("countdown", text, truth)["score"]  # noqa: E731
            assert score(row["chosen"]) == 1.0 and score(row["rejected"]) < 1.0
            kinds.add((score(row["rejected"]), len(row["chosen"]) - len(row["rejected"])))
        ones = pyarrow.parquet.read_table(folder / f"{labelled}.parquet").to_pylist()
        assert [row["label"] for row in ones] == [True, False] * (size // 2)
        assert [row["completion"] for row in ones[:2]] == [rows[0]["chosen"], rows[1]["rejected"]]
        training = {_problem(row) for row in files["train"]}
        assert all((_problem(row) in training) == (name == "preference") for row in rows)
    assert kinds == {(0.1, 0), (0.1, 2), (0.0, 4)}  # an operator or a number; a term; no closing tag


def test_deterministic_by_seed(tool: Callable[[str], ModuleType]) -> None:
    make_rows = tool("prepare_countdown").make_rows
    assert make_rows(50, 20, 0) == make_rows(50, 20, 0)
    first, second = make_rows(50, 20, 0), make_rows(50, 20, 1)
    assert all(first[name] != second[name] for name in first)
    assert {_problem(row) for row in first["val"]} == {_problem(row) for row in second["val"]}


def test_the_task_fits_its_lengths(folder: Path, tokenizer: Any) -> None:
    cfg = DataConfig(max_prompt_length=16, max_response_length=17)
    for name in ("train", "val"):
        PromptDataset([str(folder / f"{name}.parquet")], tokenizer, cfg, -1)
    columns = {"sft.answer_key": "answer"}
    prompt, answer = AnswerDataset([str(folder / "sft.parquet")], tokenizer, cfg, columns).pair(0)
    assert prompt[0] == tokenizer.bos_token_id and answer[-1] == tokenizer.eos_token_id
