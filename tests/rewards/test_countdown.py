"""Countdown scores of cases worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.rewards.scorers.countdown import compute_score

TRUTH = {"numbers": [5, 8, 5, 2], "target": 6}


def _score(answer: str, **kwargs: Any) -> float:
    found = compute_score("countdown", answer, TRUTH, **kwargs)
    assert found["acc"] == float(found["score"] == 1.0)
    return found["score"]


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("<a>8+5-5-2</a>", 1.0),
        ("<a>(8-2)*5/5</a>", 1.0),
        ("<a>8+5-2-5</a>", 1.0),
        ("<a>8-2</a>", 0.1),  # the value, without all numbers
        ("<a>8+5-5-2+2-2</a>", 0.1),  # a number too often
        ("<a>6</a>", 0.1),
        ("<a>5+5+8+2</a>", 0.1),  # the numbers, without the value
        ("<a>(8-2)/(5-5)</a>", 0.1),  # parses, and has no value
        ("<a>58-52</a>", 0.1),  # the value from digits stuck together
        ("<a>8+5-5-</a>", 0.0),
        ("<a></a>", 0.0),
        ("<a>-2+8+5-5</a>", 0.0),
        ("<a>8 +5-5-2</a>", 0.0),
        ("8+5-5-2", 0.0),
        ("<a>8+5-5-2</a>\n", 0.0),
        (" <a>8+5-5-2</a>", 0.0),
        ("<a>8+5-5-2", 0.0),
        ("<a>8+5-5-2</a><a>8+5-5-2</a>", 0.0),
        ("<a>\u0668+5-5-2</a>", 0.0),
        ("<a>" + "(" * 5000 + "</a>", 0.0),
        ("", 0.0),
    ],
)
def test_scores(answer: str, score: float) -> None:
    assert _score(answer) == score


def test_only_a_response_that_ended_scores() -> None:
    answer = "<a>8+5-5-2</a>"
    assert _score(answer, extra_info={"finish_reason": "stop"}) == 1.0
    assert _score(answer, extra_info={"finish_reason": "length"}) == 0.0


def test_format_score_is_an_argument() -> None:
    assert _score("<a>8</a>", format_score=0.0) == 0.0
    assert _score("<a>8</a>", format_score=0.25) == 0.25


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("<think>8+5 is 13</think>\n<answer>8+5-5-2</answer>", 1.0),
        ("<answer> (8 - 2) * 5\n/ 5 </answer> and more", 1.0),
        ("<answer>1</answer> no: <answer>8+5-5-2</answer>", 1.0),  # the last one counts
        ("<answer>8+5-5-2</answer> no: <answer>1</answer>", 0.1),
        ("<answer>8+5-5-2</answer> no: <answer>1", 1.0),  # the last complete pair
        ("<answer>-2 + 8 - (5 - 5)</answer>", 1.0),
        ("<answer>8 - 2</answer>", 0.1),  # the value, without all numbers
        ("<answer>8 + 5 - 5 - 2 = 6</answer>", 0.1),
        ("<answer>5 8 - 52</answer>", 0.1),
        ("<answer>5  8 - 52</answer>", 0.1),
        ("<answer>(8-2)/(5-5)</answer>", 0.1),
        ("<answer>__import__('os')</answer>", 0.1),
        ("<answer></answer>", 0.1),
        ("<answer>" + "-" * 400 + "6</answer>", 0.1),
        ("<answer>" + " " * 100_000 + "6</answer>", 0.1),
        ("<answer>8+5-5-2", 0.0),
        ("</answer>8+5-5-2<answer>", 0.0),
        ("<think>8+5-5-2</think>", 0.0),
    ],
)
def test_chat_scores(answer: str, score: float) -> None:
    assert _score(answer) == score
    assert _score(answer, extra_info={"finish_reason": "length"}) == score


def test_two_forms_differ_by_the_tag_only_where_they_must() -> None:
    assert _score("<a>-2+8+5-5</a>") == 0.0 and _score("<answer>-2+8+5-5</answer>") == 1.0
    assert _score("<answer>1</answer>", format_score=0.0) == 0.0
