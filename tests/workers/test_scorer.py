"""Scores of a batch, begun while responses were generated or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hpcrl.algorithms.metrics import finish
from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.config.schema import CustomRewardConfig, DataConfig, RewardConfig
from hpcrl.data.prompts import PromptDataset
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.rewards.manager import RewardManager
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.layout import Layout
from hpcrl.workers.scorer import ResponseScorer, ScorerWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPOSITORY = Path(__file__).parents[2]

# Counts its calls, so that a test sees who was scored anew.
FUNCTION = """
calls = 0

def compute_score(data_source, solution_str, ground_truth, extra_info):
    global calls
    calls += 1
    if solution_str == "7":
        raise ValueError("seven")
    return {"score": float(len(solution_str)) + ground_truth, "acc": ground_truth > 0, "text": solution_str,
            "why": extra_info["finish_reason"], "calls": calls}
"""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(str(REPOSITORY / "configs" / "tokenizer"))


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> dict[str, PromptDataset]:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [{"data_source": "mine", "prompt": f"{i} 2 3:", "reward_model": {"ground_truth": 10 * i}} for i in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"train": PromptDataset([str(path)], tokenizer, DataConfig(max_prompt_length=32))}


@pytest.fixture
def scorer(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, prompts: dict[str, PromptDataset]
) -> Iterator[ResponseScorer]:
    (tmp_path / "score.py").write_text(FUNCTION)
    function = CustomRewardConfig(path=str(tmp_path / "score.py"))
    scorer = ResponseScorer(RewardManager(RewardConfig(custom_reward_function=function)), tokenizer, prompts)
    yield scorer
    scorer.close()


def make_batch(scorer: ResponseScorer, answers: list[tuple[int, str]], **columns: np.ndarray) -> DataProto:
    """Rows (prompt, text of the response), each closed by the end-of-sequence token; an empty text is no token."""
    eos = int(scorer.tokenizer.eos_token_id)
    responses = [[*scorer.tokenizer.encode(text, add_special_tokens=False), eos] if text else [] for _, text in answers]
    sequences = [
        [*scorer.prompts["train"].prompt_ids(row), *response]
        for (row, _), response in zip(answers, responses, strict=True)
    ]
    tokens = {
        "input_ids": Ragged.from_rows(sequences, np.int32),
        "response_mask": Ragged.from_rows([[1] * len(response) for response in responses], np.int32),
    }
    samples = {
        "row": np.array([row for row, _ in answers]),
        "finish_reason": np.array(["stop" if text else "length" for _, text in answers], object),
    }
    return DataProto(tokens, samples | columns, {"split": "train"})


def worker(scorer: ResponseScorer | None, **cfg: float) -> ScorerWorker:
    return ScorerWorker(Layout((0,)), 0, scorer, RewardConfig.model_validate({"reward_model": {"enable": True, **cfg}}))  # type: ignore[arg-type]


def response_ids(batch: DataProto, row: int) -> np.ndarray:
    length = int(batch.fetch("response_mask").lengths[row])
    sequences = batch.fetch("input_ids")
    return sequences.values[int(sequences.offsets[row + 1]) - length : int(sequences.offsets[row + 1])]


def test_score_acc_extras_and_the_place_of_the_score(scorer: ResponseScorer) -> None:
    answers = [(1, "123"), (0, "7"), (2, ""), (0, "12")]
    scored = worker(scorer).score(make_batch(scorer, answers))
    assert scored.samples["score"].tolist() == [13.0, 0.0, 20.0, 2.0]
    assert scored.samples["score"].dtype == scored.samples["acc"].dtype == np.float32
    np.testing.assert_array_equal(scored.samples["acc"], np.array([1, np.nan, 1, 0], np.float32))
    extras = scored.samples["extras"].tolist()
    assert [extra.get("text") for extra in extras] == ["123", None, "", "12"]
    assert [extra.get("why") for extra in extras] == ["stop", None, "length", "stop"] and extras[1] == {}
    placed = scored.fetch("token_level_scores")
    rows = np.split(placed.values, placed.offsets[1:-1].tolist())
    assert [row.tolist()[:-1] for row in rows] == [[0.0] * (len(row) - 1) if len(row) else [] for row in rows]
    assert [row[-1] if len(row) else None for row in rows] == [13.0, 0.0, None, 2.0]
    assert finish(scored.metrics[0]) == {
        "reward/timeouts": 0,
        "reward/crashes": 0,
        "reward/errors": 1,
        "reward/over_limits": 0,
    }


def test_what_was_begun_is_not_scored_again_and_what_was_not_is(scorer: ResponseScorer) -> None:
    """Two samples of a prompt that are alike, one of them begun; a third, begun, that nobody asks for."""
    batch = make_batch(scorer, [(1, "12"), (1, "34"), (1, "12")])
    unasked = make_batch(scorer, [(1, "56")])
    scorer.begin("train", 1, response_ids(unasked, 0), "stop")
    for row in (0, 1):
        scorer.begin("train", 1, response_ids(batch, row), "stop")
    scored = worker(scorer).score(batch)
    assert [extra["calls"] for extra in scored.samples["extras"]] == [2.0, 3.0, 4.0]
    assert [extra["text"] for extra in scored.samples["extras"]] == ["12", "34", "12"]
    again = worker(scorer).score(make_batch(scorer, [(1, "56"), (2, "12"), (1, "12")]))
    assert [extra["calls"] for extra in again.samples["extras"]] == [1.0, 5.0, 6.0]
    assert again.samples["score"].tolist() == [12.0, 22.0, 12.0]


def test_a_reward_models_score_is_weighed_in(scorer: ResponseScorer) -> None:
    rm_score = np.array([0.5, -1.0], np.float32)
    batch = make_batch(scorer, [(1, "12"), (0, "7")], rm_score=rm_score)
    scored = worker(scorer, weight=2.0, rule_weight=0.5).score(batch)
    assert scored.samples["score"].tolist() == [0.5 * 12 + 2 * 0.5, -2.0]
    assert scored.samples["extras"][0]["rule_score"] == 12.0 and scored.samples["extras"][0]["rm_score"] == 0.5
    assert scored.fetch("token_level_scores").values[2] == 7.0
    nobody = ResponseScorer(None, scorer.tokenizer, scorer.prompts)
    nobody.begin("train", 1, response_ids(batch, 0), "stop")
    scored = worker(nobody, rule_weight=0.0).score(batch)
    assert scored.samples["score"].tolist() == [0.5, -1.0]


@pytest.mark.parametrize("given", [np.nan, np.inf])
def test_a_reward_model_that_gives_no_number_is_one_line(scorer: ResponseScorer, given: float) -> None:
    batch = make_batch(scorer, [(1, "12"), (2, "34")], rm_score=np.array([0.5, given], np.float32))
    with pytest.raises(InputError, match=f"the reward model gave rm_score={given} for a response to row 2.*"):
        worker(scorer).score(batch)


def test_texts_come_back_for_the_rows_to_show(scorer: ResponseScorer) -> None:
    batch = make_batch(scorer, [(1, "12"), (2, "3")], show=np.array([False, True]))
    scored = worker(scorer).score(batch)
    assert scored.samples["response_text"].tolist() == ["", "3"]
    assert scored.samples["prompt_text"][0] == "" and "2 2 3:" in scored.samples["prompt_text"][1]


def test_no_rows(scorer: ResponseScorer) -> None:
    scored = worker(scorer).score(make_batch(scorer, [(0, "1")])[np.array([], np.int64)])
    assert scored.samples["score"].shape == scored.samples["extras"].shape == (0,)
