"""What all scorers of text have in common: they take any text a model may write, and take it quickly."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.rewards import registry
from hpcrl.rewards.registry import PACKAGES, RULES, check_ground_truth, rule_for, scorer_for
from hpcrl.runtime.exits import InputError
from tests.rewards.verl_cases import scorers as cases

TRUTHS: dict[str, Any] = {
    "openai/gsm8k": "12",
    "lighteval/MATH": r"\frac{1}{2}",
    "math_dapo": r"\frac{1}{2}",
    "hiyouga/geometry3k": r"(\frac{1}{2},x)",
    "numina_cn_k12": r"(\frac{1}{2},2\pi)",
    "searchR1_nq": {"target": ["Paris", "the city"]},
    "gsm8k_strict": "12",
    "math_dapo_strict": r"\frac{1}{2}",
    "geometry3k_strict": r"(\frac{1}{2},x)",
    "numina_strict": r"(\frac{1}{2},2\pi)",
    "searchR1_strict": {"target": ["Paris", "the city"]},
}
TEXTS = ("openai/gsm8k", "lighteval/MATH", "math_dapo", "sums")
PIECES = [
    *r"\boxed{ \boxed \fbox{ { } ( ) [ ] $ % \% \$ \\ \frac \dfrac \sqrt \sqrt[ \text{ \left \pi \circ".split(),
    *"^ ^{ _ ! ** * / + - = , . : ` ' \" # & ~ | < > 1 23 0.5 .5 1,234 1e400 9**9**9 x y xy pi sqrt( and or".split(),
    *"#### Answer: <answer> </answer> <think> </think> million units is be".split(),
    " ", "\n", ". ", "\x00", "\u0663", "\u2028", "\ud800", "√", "\\text{ cm}",
]  # fmt: skip
ANSWERS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=30).map("".join)


@pytest.mark.parametrize("data_source", TRUTHS)
@given(text=ANSWERS, wrapped=st.booleans())
def test_no_text_raises(data_source: str, text: str, wrapped: bool) -> None:
    if wrapped:
        text = rf"<think></think>Answer: <answer>{text}</answer> \boxed{{{text}}}"
    found = scorer_for(data_source)(data_source, text, TRUTHS[data_source])
    assert -1.0 <= score_of(found) <= 1.0


def score_of(found: Any) -> float:
    return float(found["score"] if isinstance(found, dict) else found)


LONG = 20_000


@pytest.mark.parametrize("data_source", TRUTHS)
def test_long_texts_take_no_longer_than_their_length_allows(data_source: str) -> None:
    """Milliseconds; patterns that backtrack take minutes on some of these."""
    units = [
        *PIECES, "<think></think>", r"<think></think>\boxed{", r"</think>\boxed{", "<answer><answer>",
        "1 ", "1,", "1,2", "- ", "(1", "-", "2!", "x^",
        "\\frac1", "\\sqrt2", "{}", "\\pi*", "$1$", "Answer: $", "answer is ",
    ]  # fmt: skip
    for unit in units:
        text = unit * (LONG // len(unit))
        for response in (text, f"<think>{text}", rf"<think></think>\boxed{{{text}}}", f"Answer: {text}"):
            started = time.process_time()
            scorer_for(data_source)(data_source, response, TRUTHS[data_source])
            assert time.process_time() - started < 1.0, (unit, response[:40])


@pytest.mark.parametrize(
    "data_source", ["lighteval/MATH", "hiyouga/geometry3k", "numina_cn_k12", "math_strict", "geometry3k_strict"]
)
def test_the_answer_itself_is_right(data_source: str) -> None:
    truths = {
        truth for pairs in (cases.BOXES, cases.GEOMETRY) for _, truth in pairs if truth.count("{") == truth.count("}")
    }
    assert len(truths) > 20
    for truth in truths:
        assert scorer_for(data_source)(data_source, rf"<think></think>\boxed{{{truth}}}", truth) == 1.0, truth


def test_an_unknown_data_source_names_the_nearest() -> None:
    with pytest.raises(
        InputError, match=r"'gsm8k' has no .*did you mean 'openai/gsm8k'.*known: .*custom_reward_function"
    ):
        rule_for("gsm8k")


def test_a_library_that_is_not_installed_is_an_input_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"math-verify, which is not installed; pip install 'hpcrl\[math\]'"):
        rule_for("math_verify")


def test_all_rules_are_small() -> None:
    """A scoring process that loads every rule but those of packages has the standard library alone."""
    names = [pattern.replace("*", "x") for pattern, rule in RULES.items() if rule not in PACKAGES]
    code = (
        "import json, sys; from hpcrl.rewards.registry import scorer_for; before = sorted(sys.modules)\n"
        f"for name in {names!r}: scorer_for(name)\n"
        "print(json.dumps([before, sorted(sys.modules)]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = json.loads(ran.stdout)
    assert not {name for name in before if name.startswith("hpcrl.rewards.")} - {"hpcrl.rewards.registry"}
    foreign = {name.split(".")[0] for name in after} - sys.stdlib_module_names - {"hpcrl", "sitecustomize"}
    assert {name for name in foreign if not name.startswith("__")} <= {"_distutils_hack", "usercustomize"}


ANSWERED = {
    "openai/gsm8k": "#### 12",
    "lighteval/MATH": r"\boxed{12}",
    "HuggingFaceH4/MATH-500": r"\boxed{12}",
    "math_dapo": "Answer: 12",
    "aime2024": "Answer: 12",
    "numina_cn_k12": r"\boxed{12}",
    "hiyouga/geometry3k": r"<think></think>\boxed{12}",
    "sums": "12",
    "maze": "12",
}


@pytest.mark.parametrize("data_source", ANSWERED)
def test_an_integer_is_compared_as_text(data_source: str) -> None:
    for answer, expected in ((ANSWERED[data_source], True), (ANSWERED[data_source].replace("12", "13"), False)):
        scores = [scorer_for(data_source)(data_source, answer, truth) for truth in (12, "12")]
        assert scores[0] == scores[1]
        assert (score_of(scores[0]) == 1.0) is expected


def test_whole_numbers_of_countdown() -> None:
    truth = {"numbers": [1.0, 2.0], "target": 3.0}  # as pandas writes integers beside missing ones
    assert score_of(scorer_for("countdown")("countdown", "<a>1+2</a>", truth)) == 1.0


@pytest.mark.parametrize(
    ("data_source", "truths", "expected"),
    [
        *((source, (None, 12.0, True, ["12"], {"a": 1}, "1\ud83d"), "text, or an integer") for source in TEXTS),
        ("numina_cn_k12", (None, True, ["12"], float("nan")), "text, or a finite number"),
        ("hiyouga/geometry3k", (None, True, ["12"]), "text, or a finite number"),
        ("searchR1_nq", ("Paris", {}, {"target": None}, {"target": []}, {"target": [1.5]}), "{target: a text, or"),
        ("countdown", ("24", {"numbers": [1], "target": "1"}, {"numbers": [], "target": 1}), "{numbers: a list of"),
        ("taco", ("{", "[]", 3, {"inputs": ["1"], "outputs": []}, {"inputs": [1], "outputs": [1]}), "{inputs: "),
    ],
)
def test_what_a_rule_cannot_use_is_one_line(data_source: str, truths: tuple[Any, ...], expected: str) -> None:
    for truth in truths:
        with pytest.raises(
            InputError, match=rf"^a.parquet: row 3: reward_model.ground_truth is .*{data_source}"
        ) as error:
            check_ground_truth(data_source, truth, "a.parquet: row 3")
        assert f"expected {expected}" in str(error.value) or "expected Unicode text" in str(error.value)


def test_each_rule_declares_what_it_accepts() -> None:
    for data_source, rule in RULES.items():
        if rule not in PACKAGES:  # which may be missing
            assert callable(scorer_for(data_source).reader)  # type: ignore[attr-defined]
