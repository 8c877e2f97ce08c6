"""Answers that cost a parser seconds or gigabytes cost little, are wrong, and are counted."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest

from hpcrl.config.schema import RewardConfig
from hpcrl.rewards.manager import RewardManager, ScoreRequest
from hpcrl.rewards.registry import scorer_for
from hpcrl.rewards.scorers import limits
from hpcrl.rewards.scorers.math_answers import MAX_BITS, SECONDS

MANY = 50_000
NESTED = "(" * 12 + "x" + "^2-3)" * 12
NUMBERS = {"numbers": [2, 3], "target": 5}
ROWS = r" \\ ".join(" & ".join(f"a_{{{row}{column}}}" for column in range(7)) for row in range(7))
# The answer, and how it is counted.
HOSTILE: dict[str, tuple[str, str]] = {
    "braces": (r"\boxed{" + "{" * MANY + "2" + "}" * MANY + "}", "over_limits"),
    "brackets after closed ones": (r"$" + ")" * 400 + "(" * 400 + "2$", "over_limits"),
    "brackets of all kinds": (r"\boxed{" + "[({" * 40 + "2" + "})]" * 40 + "}", "over_limits"),
    "fractions": (r"\boxed{" + r"\frac{3}{" * 200 + "2" + "}" * 201, "over_limits"),
    "a tower": (r"\boxed{7^{7^{11}}}", "over_limits"),
    "a tower of products": (r"$8^{9 \cdot 9 \times 9 \cdot 99 \cdot 9999 \cdot 9}$", "over_limits"),
    "powers of powers": (r"\boxed{((((((7^9)^8)^9)^8)^9)^9)^9}", "over_limits"),
    "a tower without LaTeX": ("The answer is 9^9^9^9.", "over_limits"),
    "factorials": (r"\boxed{(12!)!}", "over_limits"),
    "a binomial": (r"\boxed{\binom{10^{12}}{7^{13}}}", "over_limits"),
    "a degree": (r"\boxed{x^{10^{11}} - 1}", "over_limits"),
    "digits": ("it is " + "31" * 400_000, "over_limits"),
    "digits in a box": (r"\boxed{" + "31" * 40_000 + "}", "over_limits"),
    "a polynomial": (rf"\boxed{{{NESTED}}}", "timeouts"),
    "a determinant": (rf"\boxed{{\det\begin{{pmatrix}} {ROWS} \end{{pmatrix}}}}", "timeouts"),
    "open formulas": (r"\( x " * 20_000, "timeouts"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_math_verify_stops(name: str) -> None:
    """At first these took 5 s each, and up to 700 MB, and were counted nowhere."""
    answer, count = HOSTILE[name]
    math_verify = scorer_for("math_verify")
    assert math_verify("math_verify", r"\boxed{x+1}", "1+x") == 1.0  # imports the library
    memory, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    assert math_verify("math_verify", answer, "x+1") == limits.stopped(count)
    assert time.process_time() - began < (SECONDS if count == "timeouts" else 0.3) + 0.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100 << 10


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("5", 2.4),
        ("1024", 10),
        (r"2^{10}", 10),
        (r"2^{2^{10}}", 1024),
        (r"-3 \cdot 2^{100} + \frac{7!}{2}", 112),
        (r"10^{-6}", 40),
        (r"\binom{20}{10}", 20),
        (r"x^{2n+1}", 32),
        (r"e^{-\frac{(x-\mu)^2}{2\sigma^2}}", 64),
        (r"\left(\frac{1}{2}, \sqrt[3]{7}\right]", 6),
    ],
)
def test_sizes_are_bounds(text: str, bits: float) -> None:
    limits.check(text, 1000, 32, 2 * bits)
    if bits > 2.4:
        with pytest.raises(limits.OverLimits):
            limits.check(text, 1000, 32, bits / 8)


@pytest.mark.parametrize(
    "text", [r"2^{1000000}", r"\frac{10000!}{9998!}", r"\binom{2024}{1012}", r"e^{i\pi}", r"2^{2^{2^{2^2}}}", "((x)))"]
)
def test_large_honest_answers_are_within_the_limits(text: str) -> None:
    limits.check(text, 1000, 32, MAX_BITS)


def test_the_time_of_the_process_counts_and_not_that_of_the_clock() -> None:
    with limits.cpu_seconds(0.2):
        time.sleep(0.5)
    with pytest.raises(limits.OutOfTime), limits.cpu_seconds(0.05):
        while True:
            pass
    time.sleep(0.2)  # the timer has ended


@pytest.mark.parametrize(
    ("data_source", "response", "truth"),
    [
        ("numina_x", r"\boxed{" + "1+" * 300 + "1}", "301"),
        ("hiyouga/geometry3k", r"\boxed{" + "(" * 70 + "1" + ")" * 70 + "}", "1"),
        ("countdown", "<answer>" + "(" * 70 + "2+3" + ")" * 70 + "</answer>", NUMBERS),
        ("countdown", "<a>" + "2+" * 300 + "3</a>", NUMBERS),
        ("math_strict", r"\boxed{" + "[" * 20 + "1" + "]" * 20 + "}", "1"),
    ],
)
def test_what_a_rule_of_our_own_does_not_compare_is_marked(data_source: str, response: str, truth: Any) -> None:
    found = scorer_for(data_source)(data_source, response, truth)
    assert found["acc"] == 0.0 and found[limits.STOPPED] == "over_limits"


def test_they_are_counted_and_are_wrong_answers() -> None:
    manager = RewardManager(RewardConfig())
    texts = [r"\boxed{4}", r"\boxed{" + "2+" * 300 + "2}", r"\boxed{5}"]
    scores, acc, extras, counts = manager.score([ScoreRequest("numina_x", text, "4") for text in texts])
    manager.close()
    assert scores.tolist() == acc.tolist() == [1.0, 0.0, 0.0]
    assert extras == [{"acc": 1.0}, {"acc": 0.0}, {"acc": 0.0}]
    assert counts == {"reward/timeouts": 0, "reward/crashes": 0, "reward/errors": 0, "reward/over_limits": 1}
