"""Each scorer gives what verl 0.9.1's gave for the same response and ground truth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.rewards.registry import scorer_for
from tests.rewards.verl_cases.scorers import CASES

RECORDED = json.loads((Path(__file__).parent / "verl_cases" / "scorers.json").read_text(encoding="utf-8"))
DATA_SOURCES = {
    "gsm8k": "openai/gsm8k",
    "math_boxed": "lighteval/MATH",
    "math_dapo": "aime2024",
    "geometry3k": "hiyouga/geometry3k",
    "numina": "numina_cn_k12",
    "search_r1": "searchR1_nq",
    "math_verify": "math_verify",
    "code": "taco",
}


@pytest.mark.parametrize("rule", DATA_SOURCES)
def test_scores_are_those_of_verl(rule: str) -> None:
    data_source = DATA_SOURCES[rule]
    cases = {name: case for name, case in CASES.items() if case["rule"] == rule}
    found = {
        name: scorer_for(data_source)(data_source, case["solution"], case["truth"], **case["kwargs"])
        for name, case in cases.items()
    }
    assert len(found) >= 6
    assert found == {name: RECORDED[name] for name in cases}
