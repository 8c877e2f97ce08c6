"""Samplers: what a run draws does not depend on how it asks or where it was interrupted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.config.schema import DataConfig
from hpcrl.data.curriculum import (
    AbstractCurriculumSampler,
    Curriculum,
    DifficultyCurriculum,
    LevelCurriculum,
    StepReport,
    pack,
    step_report,
    unpack,
)
from hpcrl.data.prompts import PromptDataset
from hpcrl.data.sampler import OrderedSampler, Sampler, WeightedFiles, make_sampler
from hpcrl.runtime.exits import InputError

CYCLING = """
import numpy as np
from hpcrl.data.curriculum import AbstractCurriculumSampler

class Cycling(AbstractCurriculumSampler):
    next = 0

    def choose(self, n):
        rows = (self.next + np.arange(n)) % len(self.data_source)
        self.next += n
        return rows

    def update(self, report):
        self.next += int(report.mean_score.sum())

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]

class Nothing:
    pass
"""


@pytest.fixture
def dataset(tmp_path: Path, tokenizer: Any) -> PromptDataset:
    """Six prompts of one file and three of another, which had a fourth before the filter."""
    for name, count in (("a", 6), ("b", 3)):
        rows = [{"prompt": f"{i} 1 2:"} for i in range(count)] + [{"prompt": "1" * 600}] * (name == "b")
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "cycling.py").write_text(CYCLING)
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    return PromptDataset(files, tokenizer, DataConfig(filter_overlong_prompts=True))


def config(folder: Path, **more: Any) -> DataConfig:
    return DataConfig.model_validate({"train_files": [str(folder / "a.jsonl"), str(folder / "b.jsonl")], **more})


KINDS: dict[str, dict[str, Any]] = {
    "ordered": {},
    "weighted": {"train_weights": [1.0, 2.0]},
    "difficulty": {"sampler": {"class_name": "DifficultyCurriculum"}},
    "level": {"sampler": {"class_name": "LevelCurriculum", "LevelCurriculum": {"raise_at": 0.5}}},
    "own": {"sampler": {"class_path": "cycling.py", "class_name": "Cycling"}},
}


def make(kind: str, dataset: PromptDataset, folder: Path) -> Sampler:
    settings = json.loads(json.dumps(KINDS[kind]))
    if "class_path" in settings.get("sampler", {}):
        settings["sampler"]["class_path"] = str(folder / "cycling.py")
    return make_sampler(dataset, config(folder, **settings), 7)


def report(step: int, rows: np.ndarray, epochs: np.ndarray) -> StepReport:
    """As if even rows were always solved and odd ones half of the time."""
    n = 2 * len(rows)
    prompt = np.repeat(np.arange(len(rows)), 2)
    solved = np.where((rows[prompt] % 2 == 0) | (np.arange(n) % 2 == 0), 1.0, 0.0).astype(np.float32)
    samples = {"row": rows[prompt], "epoch": epochs[prompt], "prompt": prompt, "score": solved, "acc": solved}
    return step_report(step, {**samples, "response_length": np.full(n, 5, np.int32)})


def draw(sampler: Sampler, steps: range, size: int = 4) -> list[tuple[int, int]]:
    found = []
    for step in steps:
        rows, epochs = sampler.next_rows(size)
        assert rows.dtype == epochs.dtype == np.int64
        sampler.update(report(step, rows, epochs))
        found += zip(rows.tolist(), epochs.tolist(), strict=True)
    return found


def test_the_default_order_is_that_of_the_steps_whatever_the_size_of_a_draw() -> None:
    sampler = OrderedSampler(10, 3, True)
    rows = np.concatenate([sampler.next_rows(n)[0] for n in (4, 1, 7, 8)])
    assert rows.tolist() == OrderedSampler(10, 3, True).next_rows(20)[0].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_draws_what_an_unbroken_one_draws(kind: str, dataset: PromptDataset, tmp_path: Path) -> None:
    straight = draw(make(kind, dataset, tmp_path), range(1, 9))
    first, second = make(kind, dataset, tmp_path), make(kind, dataset, tmp_path)
    before = draw(first, range(1, 5))
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert before + draw(second, range(5, 9)) == straight
    assert len(set(straight)) == len(straight), "a row came twice in one epoch, so two prompts had the same uid"


def test_weights_are_shares_and_rows_of_the_smaller_file_come_more_often(
    dataset: PromptDataset, tmp_path: Path
) -> None:
    assert dataset.file_sizes == [6, 3]
    drawn = draw(make("weighted", dataset, tmp_path), range(1, 10))
    of_b = [(row, epoch) for row, epoch in drawn if row >= 6]
    assert len(of_b) == 24 and len(drawn) == 36
    assert max(epoch for _, epoch in of_b) == 7
    assert max(epoch for row, epoch in drawn if row < 6) == 1


def test_the_difficulty_curriculum_prefers_prompts_that_are_solved_half_of_the_time(
    dataset: PromptDataset, tmp_path: Path
) -> None:
    sampler = make("difficulty", dataset, tmp_path)
    assert sorted(sampler.next_rows(9)[0].tolist()) == list(range(9)), "new prompts come without replacement"
    draw(sampler, range(1, 4), size=9)
    odd = np.mean([row % 2 for row, _ in draw(sampler, range(4, 104), size=2)])
    assert odd > 0.75


def test_a_report_has_one_entry_per_prompt() -> None:
    found = step_report(
        3,
        {
            "row": np.array([5, 2, 5, 2]),
            "epoch": np.array([0, 1, 0, 1]),
            "prompt": np.array([1, 0, 1, 0], np.int32),
            "score": np.array([1.0, 0.5, 3.0, 0.5], np.float32),
            "acc": np.array([1.0, np.nan, 0.0, np.nan], np.float32),
            "response_length": np.array([4, 1, 6, 2], np.int32),
        },
    )
    assert found.step == 3
    assert found.rows.tolist() == [2, 5] and found.epochs.tolist() == [1, 0]
    assert found.mean_score.tolist() == [0.5, 2.0] and found.std_score.tolist() == [0.0, 1.0]
    assert np.isnan(found.mean_acc[0]) and found.mean_acc[1] == 0.5
    assert found.mean_response_length.tolist() == [1.5, 5.0]


class Fixed(AbstractCurriculumSampler):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def choose(self, n: int) -> Any:
        return self.rows


def test_prompts_whose_scoring_failed_are_not_unsolved(dataset: PromptDataset, tmp_path: Path) -> None:
    curriculum = DifficultyCurriculum(dataset, config(tmp_path), 0)
    numbers = np.array([0.0, 0.5])
    report = StepReport(1, np.array([3, 4]), np.zeros(2, np.int64), *[numbers] * 2, np.array([np.nan, 0.5]), numbers)
    curriculum.update(report)
    assert np.isnan(curriculum.solved[3]) and curriculum.solved[4] == 0.5


def test_levels_are_added_when_a_data_source_is_solved(tmp_path: Path, tokenizer: Any) -> None:
    levels = {"a": [2, 0, "Level 1", 0, 2], "b": [None, 5]}
    rows = [
        {"prompt": f"{i} 1 2:", "data_source": source, "extra_info": {"level": level}}
        for source, found in levels.items()
        for i, level in enumerate(found)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = PromptDataset([str(tmp_path / "a.jsonl")], tokenizer, DataConfig())
    curriculum = LevelCurriculum(dataset, DataConfig(), 0)

    def step(rows: list[int], accs: list[float]) -> set[int]:
        acc, zero = np.array(accs), np.zeros(len(rows), np.int64)
        curriculum.update(StepReport(1, np.array(rows), zero, acc, acc, acc, acc))
        return set(curriculum.choose(20).tolist())

    assert set(curriculum.choose(3).tolist()) == set(curriculum.choose(7).tolist()) == {1, 3, 5}
    assert step([1, 3, 5], [0.7, 0.8, np.nan]) == {1, 3, 5}
    assert step([1, 3, 5], [1.0, 1.0, 1.0]) == {1, 2, 3, 5, 6}  # 0.875 in the mean over both steps
    assert step([1, 3], [1.0, 1.0]) == {1, 2, 3, 5, 6}  # not of the highest level
    other = LevelCurriculum(dataset, DataConfig(), 0)
    other.load_state_dict(json.loads(json.dumps(curriculum.state_dict())))
    assert other.choose(4).tolist() == curriculum.choose(4).tolist()
    assert step([2], [1.0]) == set(range(7))


def test_rows_drawn_twice_are_in_epochs_of_their_own() -> None:
    curriculum = Curriculum(Fixed([2, 0, 2, 2]), 3)
    assert curriculum.next_rows(4)[1].tolist() == [0, 0, 1, 2]
    assert curriculum.next_rows(4)[1].tolist() == [3, 1, 4, 5]


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([0, 3], "data.sampler Fixed.choose(2) returned row 3; expected rows from 0 to 2"),
        ([-1, 0], "data.sampler Fixed.choose(2) returned row -1; expected rows from 0 to 2"),
        ([0], "data.sampler Fixed.choose(2) returned int64 of shape (1,); expected 2 whole numbers"),
        ([0.0, 1.0], "data.sampler Fixed.choose(2) returned float64 of shape (2,); expected 2 whole numbers"),
    ],
)
def test_rows_that_are_not_there_are_refused(rows: Any, line: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(line)}$"):
        Curriculum(Fixed(rows), 3).next_rows(2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train_weights": [1.0]}, "1 weights for 2 data.train_files"),
        ({"train_weights": [1.0, 1e-9]}, "b.jsonl: its weight of 1e-09 is less than 1/10000"),
        ({"train_weights": [1.0, 1.0], "sampler": {"class_name": "DifficultyCurriculum"}}, "use one of them"),
        ({"sampler": {"class_name": "Hard"}}, "Hard is not a built-in sampler; use DifficultyCurriculum"),
        ({"sampler": {"class_path": "x.py"}}, "without data.sampler.class_name"),
        ({"sampler": {"class_path": "no.py", "class_name": "X"}}, "no.py: ImportError: no such file"),
        ({"sampler": {"class_path": "cycling.py", "class_name": "X"}}, "'X' is missing; expected a subclass"),
        ({"sampler": {"class_path": "cycling.py", "class_name": "Nothing"}}, "Nothing'>; expected a subclass"),
    ],
)
def test_bad_settings_get_one_line(
    settings: dict[str, Any],
    words: str,
    dataset: PromptDataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        make_sampler(dataset, config(tmp_path, **settings), 0)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_weighted_file_needs_prompts() -> None:
    with pytest.raises(InputError, match="^b: no prompt is left to draw after the filter"):
        WeightedFiles(["a", "b"], [3, 0], [1.0, 1.0], 0, True)


def test_a_checkpoint_of_another_sampler_is_refused(dataset: PromptDataset, tmp_path: Path) -> None:
    ordered, own = make("ordered", dataset, tmp_path), make("own", dataset, tmp_path)
    with pytest.raises(InputError, match=r"\(built-in order\).* Cycling;"):
        own.load_state_dict(ordered.state_dict())
    with pytest.raises(InputError, match=r"data.sampler Cycling, but the config has the built-in order"):
        ordered.load_state_dict(own.state_dict())
    with pytest.raises(InputError, match="has drawn from 9 prompts, but data.train_files have 4"):
        fewer = Curriculum(own.chooser, 4)  # type: ignore[attr-defined]
        fewer.load_state_dict(own.state_dict())


def test_packed_arrays_come_back() -> None:
    array = np.array([0.5, np.nan, -3.0], np.float32)
    assert np.array_equal(unpack(json.loads(json.dumps(pack(array))), np.float32), array, equal_nan=True)
