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
from hpcrl.rewards.registry import RULES, rule_for, scorer_for
from hpcrl.runtime.exits import InputError
from tests.rewards.verl_cases import scorers as cases

TRUTHS: dict[str, Any] = {
    "openai/gsm8k": "12",
    "lighteval/MATH": r"\frac{1}{2}",
    "math_dapo": r"\frac{1}{2}",
    "hiyouga/geometry3k": r"(\frac{1}{2},x)",
    "numina_cn_k12": r"(\frac{1}{2},2\pi)",
    "searchR1_nq": {"target": ["Paris", "the city"]},
}
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
    score = found["score"] if isinstance(found, dict) else found
    assert -1.0 <= score <= 1.0


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


@pytest.mark.parametrize("data_source", ["lighteval/MATH", "hiyouga/geometry3k", "numina_cn_k12"])
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
    """A scoring process that loads every rule but math_verify's has the standard library alone."""
    names = [pattern.replace("*", "x") for pattern, module in RULES.items() if module != "math_verify"]
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
