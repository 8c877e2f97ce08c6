"""Ranks share the work on a dataset: all of them have what one rank makes alone, and the same error."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hpcrl.config.schema import DataConfig
from hpcrl.data import answers, prompts
from hpcrl.data.answers import AnswerDataset
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.world import World

pytestmark = [pytest.mark.world(2, 4), pytest.mark.ci_world(2)]

TOKENIZER = load_tokenizer(str(Path(__file__).parents[2] / "configs" / "tokenizer"))
COLUMNS = {"rm.chosen_key": "chosen", "rm.rejected_key": "rejected"}
CONFIG = DataConfig(max_prompt_length=8, max_response_length=8, filter_overlong_prompts=True)


def write(folder: Path, world: World, name: str, bad: int | None = None) -> str:
    """11 rows, of which some are too long; `bad` has a letter that the tokenizer lacks."""
    rows = [
        {"prompt": "?" if number == bad else "12+" * (1 + number % 3), "chosen": "4+5" * (number % 2), "rejected": "7"}
        for number in range(11)
    ]
    path = folder / name
    if world.rank == 0:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    world.barrier()
    return str(path)


@pytest.fixture(autouse=True)
def two_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (prompts, answers):
        monkeypatch.setattr(module, "TOKENISE_ROWS", 2)


def test_the_dataset_is_that_of_one_rank(world: World, world_tmp_path: Path) -> None:
    files = [write(world_tmp_path, world, name) for name in ("a.jsonl", "b.jsonl")]
    alone = AnswerDataset(files, TOKENIZER, CONFIG, COLUMNS, max_samples=17)
    shared = AnswerDataset(files, TOKENIZER, CONFIG, COLUMNS, max_samples=17, world=world)
    assert 0 < len(shared) == len(alone) < 17
    assert shared.num_filtered == alone.num_filtered
    assert shared.file_sizes == alone.file_sizes
    for row in range(len(alone)):
        assert shared.uid(row, 0) == alone.uid(row, 0)
        for side in (0, 1):
            for found, expected in zip(shared.pair(row, side), alone.pair(row, side), strict=True):
                assert found.dtype == expected.dtype == np.int32
                assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("bad", [0, 3, 10])
def test_a_bad_row_is_the_same_error_on_all_ranks(world: World, world_tmp_path: Path, bad: int) -> None:
    path = write(world_tmp_path, world, "bad.jsonl", bad)

    def read() -> AnswerDataset:
        return AnswerDataset([path], TOKENIZER, CONFIG, COLUMNS, world=world)

    with pytest.raises(InputError, match=f"bad.jsonl: row {bad}: the tokenizer cannot encode") as caught:
        world.run_collectively(read)
    assert len(set(world.all_gather_object(str(caught.value)))) == 1


def test_an_error_of_one_rank_alone_is_that_of_all(world: World, world_tmp_path: Path) -> None:
    """A file that a node does not have: that rank never comes to the work that is shared."""
    path = write(world_tmp_path, world, "good.jsonl")
    last = world.rank == world.size - 1

    def read() -> AnswerDataset:
        return AnswerDataset([path + ".gone" if last else path], TOKENIZER, CONFIG, COLUMNS, world=world)

    with pytest.raises(InputError, match="gone"):
        world.run_collectively(read)
    assert world.all_gather_object(world.rank) == list(range(world.size))  # nobody is a message ahead
