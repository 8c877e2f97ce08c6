"""What verl's rules take for right and is not, their strict variants do not."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.rewards.registry import scorer_for

NINES = "9" * 1000
SILENT = "```python\nimport os\nos._exit(0)\n```"
SUM = "```python\nprint(sum(map(int, input().split())))\n```"
# (verl's rule, strict rule): (response, ground truth) with full marks from the first and none from the second.
WRONG: dict[tuple[str, str], list[tuple[str, Any]]] = {
    ("numina_cn_k12", "numina_strict"): [
        (r"\boxed{4500}", "45"),
        (r"\boxed{0.45}", "45"),
        (r"\boxed{45.004}", "45"),
        (r"\boxed{45_36}", "45"),
        (r"\boxed{3=8=45}", "45"),
        (r"\boxed{45 \text{ or } 46}", "45"),
        (r"\boxed{" + NINES + "1}", NINES),
        (r"\boxed{(300,0.04)}", "(3,4)"),
        (r"\boxed{628}", r"2\pi"),
        (r"\boxed{}", ""),
    ],
    ("lighteval/MATH", "math_strict"): [
        (r"\boxed{9=31}", "31"),
        (r"\boxed{31\text{ or 32}}", "31"),
        (r"\boxed{31\text{ or thirty-two}}", "31"),
        (r"\boxed{31\%}", "31"),
        (r"\boxed 31, or 32", "31, or 32"),
    ],
    ("aime2024", "math_dapo_strict"): [
        ("Answer: $204$ or 205", "204"),
        ("Answer: $204$, $205$", "204"),
        ("Answer: 1=7=204", "204"),
        ("Answer: 2square04", "204"),
    ],
    ("hiyouga/geometry3k", "geometry3k_strict"): [
        (r"<think></think>\boxed{60%}", "60"),
        (r"<think></think>\boxed{60 \text{ or 70}}", "60"),
        (r"<think></think>\boxed{\frac{1+7}{2}}", "4.5"),
        (r"<think></think>\boxed{4.00000001}", "4"),
    ],
    ("openai/gsm8k", "gsm8k_strict"): [
        ("#### 17\n#### 18", "18"),
        ("#### 18 or 19", "18"),
        ("#### 18\nOr is it 19?", "18"),
        ("#### ,", ""),
    ],
    ("searchR1_nq", "searchR1_strict"): [
        ("<answer></answer>", {"target": "A"}),
        ("<answer>an the</answer>", {"target": ["The"]}),
        ("<answer>...</answer>", {"target": ["!"]}),
        ("<answer>Oslo</answer> <answer>Bergen</answer>", {"target": "Bergen"}),
    ],
}
RIGHT: dict[str, list[tuple[str, Any]]] = {
    "math_strict": [
        (r"\boxed{45}", "45"),
        (r"\boxed{4,500}", "4500"),
        (r"\boxed{\dfrac{3}{4}}", "0.75"),
        (r"\boxed{\frac{1+\sqrt 5}{2}}", r"\frac12+\frac{\sqrt{5}}{2}"),
        (r"\boxed{x = -3}", "-3"),
        (r"\boxed{12\text{ cm}^2}", "12"),
        (r"\boxed{60^\circ}", "60"),
        (r"\boxed{\left(\tfrac12, 2\pi\right)}", r"(0.5,2\pi)"),
        (r"\boxed{[0,\infty)}", r"[0, \infty)"),
        (r"\boxed{(x+1)^2}", "x^2+2x+1"),
        (r"\boxed{\text{Tuesday}}", "Tuesday"),
        (r"\boxed{1, 2}", "1,2"),
    ],
    "math_dapo_strict": [("Answer: $204$.", "204"), (r"Answer: \boxed{204}", "204"), ("Answer: 205\nAnswer: 204", 204)],
    "geometry3k_strict": [(r"<think></think>\boxed{2\sqrt{3}}", r"\sqrt{12}")],
    "gsm8k_strict": [("so\n#### 1,234\n", "1234"), ("#### -5.", -5)],
    "searchR1_strict": [("<answer>The Paris!</answer>", {"target": ["Rome", "paris"]})],
}  # fmt: skip


def score(data_source: str, response: str, truth: Any) -> float:
    found = scorer_for(data_source)(data_source, response, truth, sandbox="best_effort")
    return found["score"] if isinstance(found, dict) else found


@pytest.mark.parametrize("rules", WRONG)
def test_a_wrong_answer_that_the_rule_accepts(rules: tuple[str, str]) -> None:
    for response, truth in WRONG[rules]:
        assert score(rules[0], response, truth) == 1.0, response
        assert score(rules[1], response, truth) <= 0.1, response


@pytest.mark.parametrize("rule", RIGHT)
def test_a_right_answer_stays_right(rule: str) -> None:
    for response, truth in RIGHT[rule]:
        assert score(rule, response, truth) == 1.0, response


def test_an_empty_response_is_no_answer() -> None:
    assert score("sums", " ", "") == score("maze", "", "\n") == 0.0


def test_a_program_that_prints_nothing() -> None:
    tests = {"inputs": ["", "1 2", ""], "outputs": ["", "3", " \n"]}
    assert score("taco", SILENT, tests) == pytest.approx(2 / 3)
    assert score("code_strict", SILENT, tests) == 0.0
    assert score("code_strict", SUM, tests) == 1.0
    with pytest.raises(ValueError, match="a test whose output is not empty"):
        score("code_strict", SILENT, {"inputs": ["1"], "outputs": [""]})
