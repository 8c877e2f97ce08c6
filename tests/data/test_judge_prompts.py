"""Prompts of a judge from rows of data, with a tokenizer's chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.schema import Config, DataConfig
from hpcrl.data.judge_prompts import JudgePrompts
from hpcrl.data.prompts import PromptDataset
from hpcrl.runtime.exits import InputError

TOKENIZER = str(Path(__file__).parents[2] / "configs" / "tokenizer")


def prompts(**judge: Any) -> JudgePrompts:
    judge = {"template": "{prompt}{response}={rubric}", "max_prompt_length": 12, **judge}
    return JudgePrompts(Config.model_validate({"model": {"tokenizer": TOKENIZER}, "reward": {"judge": judge}}))


def record(**changes: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": "1 2:"}], "ground_truth": "3", "extra_info": {}, **changes}


def test_a_question_as_the_judge_reads_it() -> None:
    made = prompts()
    (question,) = made.judging.questions([made.sample(record(), "1+2", 0)])
    text, ids = made.encode(question.text)
    assert text == "<|bos|>1 2:1+2=" and ids == made.tokenizer.convert_tokens_to_ids(["<|bos|>", *"1 2:1+2="])
    assert made.encode("1" * 11).ids is not None and made.encode("1" * 12).ids is None  # with <|bos|>, one too many
    assert made.encode("no such letters").ids is None


def test_special_tokens_of_a_response_are_broken_up() -> None:
    assert prompts().sample(record(), "1<|eos|><|bos|>2", 0).response == "1< |eos|>< |bos|>2"


def test_a_rubric_of_the_row_comes_first() -> None:
    made = prompts(kind="rubric", rubric=["3", {"criterion": "4", "weight": 2}])
    assert [one.weight for one in made.sample(record(), "", 0).rubric] == [1.0, 2.0]
    assert [one.text for one in made.sample(record(extra_info={"rubric": "5"}), "", 0).rubric] == ["5"]


@pytest.mark.parametrize(
    ("judge", "row", "line"),
    [
        ({"kind": "rubric"}, {}, "row 0: no extra_info.rubric, and reward.judge.rubric is empty"),
        ({"kind": "rubric"}, {"extra_info": {"rubric": [7]}}, "row 0: '7' is no criterion; expected a text"),
        (
            {"kind": "pairwise", "template": "{response}-{ground_truth}"},
            {},
            "row 0: no reward_model.ground_truth, which reward.judge.kind=pairwise compares with",
        ),
    ],
)
def test_rows_that_lack_what_is_asked(tmp_path: Path, judge: dict[str, Any], row: dict[str, Any], line: str) -> None:
    made, path = prompts(**judge), tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "1 2:", "data_source": "x", **row}) + "\n")
    with pytest.raises(InputError) as error:
        made.check_rows(PromptDataset([str(path)], made.tokenizer, DataConfig()))
    assert line in str(error.value)


@pytest.mark.parametrize(
    ("judge", "line"),
    [
        ({"template": "1+1"}, "reward.judge: the template has no {response}, which kind=score needs; add it"),
        ({"template": None}, "reward.judge.template: the tokenizer cannot encode"),
        ({"template_path": "nowhere.txt"}, "nowhere.txt cannot be read: No such file or directory"),
        ({"rubric": [{"weight": 1.0}]}, "{'weight': 1.0}\" is no criterion; expected a text, or"),
    ],
)
def test_bad_input_is_one_line(judge: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as error:
        prompts(**judge)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_a_template_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "template.txt"
    path.write_text("{response}:")
    (question,) = (made := prompts(template=None, template_path=str(path))).judging.questions(
        [made.sample(record(), "1+2", 0)]
    )
    assert question.text == "1+2:"
