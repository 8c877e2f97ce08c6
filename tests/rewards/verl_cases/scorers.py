r"""What verl 0.9.1's scorers give for the answers below; recorded in scorers.json.

Recording needs, besides verl: mathruler 0.1.0 (with tqdm), pylatexenc 2, sympy, and math-verify 0.9.
"""

from __future__ import annotations

import json
from typing import Any

FORMAT = "json"

WORDS = "The train goes on and on. " * 20

GSM8K = [
    ("Thus 5+7 is 12.\n#### 12", "12"),
    ("#### 12\nno, wait\n#### 13", "13"),
    ("#### 1,234", "1234"),
    ("#### 12.", "12"),
    ("#### 12.0", "12"),
    ("#### -5", "-5"),
    ("#### $5", "5"),
    ("####12", "12"),
    ("The answer is 12", "12"),
    ("#### 12 " + WORDS, "12"),
    (WORDS + "#### 12", "12"),
    ("so 3, 4 and . then", "4"),
    ("well, then.", "4"),
    ("1,234 in all", "1234"),
    ("...", "4"),
    ("", "4"),
]
BOXES = [
    (r"so \boxed{\frac{1}{2}}", "0.5"),
    (r"so \boxed{0.5}", r"\frac12"),
    (r"so \boxed{.5}", "1/2"),
    (r"so \boxed{0.25}", r"\frac14"),
    (r"\boxed{\dfrac{3}{4}}", r"\tfrac34"),
    (r"\boxed{3/4}", r"\frac{3}{4}"),
    (r"\boxed{-3/4}", r"\frac{-3}{4}"),
    (r"\boxed{03/4}", r"\frac{3}{4}"),
    (r"\boxed{\frac1{72}}", r"\frac{1}{72}"),
    (r"\boxed{\frac{72}1}", r"\frac{72}{1}"),
    (r"\boxed{\sqrt3}", r"\sqrt{3}"),
    (r"\boxed{\sqrt 3}", r"\sqrt{3}"),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
    (r"\boxed{\sqrt}", r"\sqrt"),
    (r"\boxed{\frac}", r" \frac"),
    (r"\boxed{\frac1}", r"\frac1"),
    (r"\boxed{5\text{ cm}}", "5"),
    (r"\boxed{5\text{cm}}", "5"),
    (r"\boxed{5 \text{ cm} \text{ high}}", r"5 \text{ cm} \text{ high}"),
    (r"\boxed{50\%}", "50"),
    (r"\boxed{50%}", "50"),
    (r"\boxed{90^\circ}", "90"),
    (r"\boxed{90^{\circ}}", "90"),
    (r"\boxed{x=5}", "5"),
    (r"\boxed{abc=5}", "5"),
    (r"\boxed{\$1,\!000}", "1,000"),
    (r"\boxed{1,000}", "1000"),
    (r"\boxed{\left(1, 2\right)}", "(1,2)"),
    (r"\boxed{(1,\\2)}", r"(1,\2)"),
    (r"\boxed 5$ is it", "5"),
    (r"\boxed{6} or \boxed 5", "5"),
    (r"\boxed 5 or \boxed{6}", "6"),
    (r"\fbox{5}", "5"),
    (r"\boxed{4} and \boxed{5", "4"),
    (r"\boxed{\text{\boxed{5}}}", "5"),
    (r"\boxed", "5"),
    ("5", "5"),
    ("", "5"),
]
DAPO = [
    ("Answer: 34", "34"),
    ("answer : $34$", "34"),
    ("Answer:\n 34", "34"),
    ("Answer: 33\nAnswer: 34", "34"),
    ("Answer: x = 34 dollars", "34"),
    ("Answer: $x = \\frac12$.", r"\frac{1}{2}"),
    (r"Answer: \sqrt3", r"\sqrt{3}"),
    (r"Answer: \boxed{34}", "34"),
    (r"Answer: 1,234", "1234"),
    (r"Answer: 1,2,34", "1234"),
    (r"Answer: \text{a square}", "a"),
    (r"Answer: 90^\circ", "90"),
    (r"Answer: 3 \text{ m}", "3"),
    (r"Answer: \$5", "5"),
    (r"Answer: 5\;\mathrm{th}", "5"),
    ("Answer: an apple", "apple"),
    ("Answer: [INVALID]", "5"),
    (r"Answer: [INVALID] \boxed{5}", "5"),
    (r"So \boxed{34}", "34"),
    (r"So \boxed{$34$}", "34"),
    (r"So \boxed{34} " + "x" * 120, "34"),
    (r"So \boxed{33} or \boxed{34", "33"),
    ("Answer: 34\n" + "x" * 301, "34"),
    ("it is 34", "34"),
    ("", "34"),
]
GEOMETRY = [
    (r"<think>so</think>\boxed{5}", "5"),
    (r"<think>so</think> it is \boxed{6}.", "5"),
    (r"\boxed{5}", "5"),
    (r"a <think>so</think>\boxed{5}", "5"),
    (r"<think>\boxed{5}</think>", "5"),
    (r"<think></think>\boxed{5", "5"),
    ("<think></think> None", "None"),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
    (r"\boxed{\sqrt{12}}", r"2 \sqrt { 3 }"),
    (r"\boxed{\frac{\sqrt{3}}{2}}", r"\sqrt{3}/2"),
    (r"\boxed{\frac{\sqrt{3}}{3}}", r"\frac{1}{\sqrt{3}}"),
    (r"\boxed{0.5}", r"\frac{1}{2}"),
    (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}"),
    (r"\boxed{5.0}", "5"),
    (r"\boxed{4+1}", "5"),
    (r"\boxed{10.5}", "21/2"),
    (r"\boxed{3\frac{1}{2}}", "3.5"),
    (r"\boxed{3 1/2}", "3.5"),
    (r"\boxed{5 \text{ cm}}", "5"),
    (r"\boxed{5 meters}", "5"),
    (r"\boxed{25\pi}", r"\pi 5^2"),
    (r"\boxed{78.54}", r"25\pi"),
    (r"\boxed{90^\circ}", "90"),
    (r"\boxed{50%}", "50"),
    (r"\boxed{1,234}", "1234"),
    (r"\boxed{(1, 2)}", "(1,2)"),
    (r"\boxed{(2,1)}", "(1,2)"),
    (r"\boxed{[1,2]}", "(1,2)"),
    (r"\boxed{(0.5,\sqrt{8})}", r"(\frac{1}{2},2\sqrt{2})"),
    (r"\boxed{x(x+1)}", "x^2+x"),
    (r"\boxed{2x+y}", "y+2x"),
    (r"\boxed{x+y+z}", "z+y+x"),
    (r"\boxed{2^{10}}", "1024"),
    (r"\boxed{2^10}", "1024"),
    (r"\boxed{1/0}", "2/0"),
    (r"\boxed{\text{Parallel}}", "parallel"),
    (r"\boxed{-  3}", "-3"),
    (r"\boxed{3 million}", "3000000"),
    (r"\boxed{\frac{1}{2}", "0.5"),
    ("", "5"),
]
NUMINA = [
    (r"Step 2: the answer is \boxed{5}", "5"),
    ("The answer is: 5", "5"),
    ("We get x = 5. That is the answer", "5"),
    ("The answer is 50%", "0.5"),
    ("The answer is 0.50001", "0.5"),
    ("The answer is 0.51", "0.5"),
    ("The answer is $5", "5.0"),
    (r"\boxed{2\pi}", "6.28"),
    (r"\boxed{6.28318}", r"2\pi"),
    (r"\boxed{6.3}", r"2\pi"),
    (r"\boxed{12_8}", "12"),
    (r"\boxed{x_8}", "12"),
    (r"\boxed{(1, 2)}", "1, 2"),
    (r"\boxed{(0.1, 2)}", "(10, 2)"),
    (r"\boxed{1, 2}", "1, 3"),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
    (r"\boxed{1.41421}", r"\sqrt{2}"),
    (r"\boxed{3 liters}", "3"),
    (r"\fbox{5}", "5"),
    ("Interval(1, 2)", "[1, 2]"),
    ("the values are 1 and 2", "1 , 2"),
    ("no idea", "5"),
    ("", "5"),
]
SEARCH = [
    ("<answer>Paris</answer>", "paris"),
    ("<answer>The  Paris!</answer>", ["London", "Paris"]),
    ("<answer>Lyon</answer><answer> Paris </answer>", ["Paris"]),
    ("<answer>Paris</answer><answer>Lyon</answer>", ["Paris"]),
    ("<answer>Paris <answer>Paris</answer>", ["Paris"]),
    ("<answer>Paris", ["Paris"]),
    ("Paris", ["Paris"]),
    ("<answer>a\nb</answer>", ["b"]),
    ("<answer>Paris</answer>" * 11, ["Paris"]),
    ("<answer>Paris</answer>" * 10, ["Paris"]),
    ("<answer>Lyon</answer>" * 11, ["Paris"]),
    ("<answer></answer>", [""]),
    ("", ["Paris"]),
]
MATH_VERIFY = [
    (r"so \boxed{0.5}", r"\frac{1}{2}"),
    (r"so \boxed{\sqrt{12}}", r"2\sqrt{3}"),
    ("the answer is $x = 3$", "3"),
    (r"\boxed{4}", "3"),
    (r"\boxed{\{1,2\}}", r"\{2,1\}"),
    ("", "3"),
]

SUM = {"inputs": ["1 2\n", "3 4\n", "5 6\n", "10 -3\n"], "outputs": ["3\n", "7\n", "11\n", "7\n"]}
HALF = {"inputs": ["1", "2", "3"], "outputs": ["0.5", "1.0", "1.5"]}
PAIRS = {"inputs": ["[1, 2]\n3", "[]\n0"], "outputs": ["[[1, 2, 3]]", "[0]"], "fn_name": "f"}
MORE = {"inputs": ["[1, 2]\n3", "[]\n0", "[4]\n5"], "outputs": ["[[1, 2, 3]]", "[0]", "[5, 4]"], "fn_name": "f"}
COUNTS = {"inputs": ["[1, 2, 1]"], "outputs": ['{"1": 2, "2": 1}'], "fn_name": "f"}
ROWS = {"inputs": ["2"], "outputs": ["[[[0, 0], [1, 1]]]"], "fn_name": "f"}
FLAT = {"inputs": ["2"], "outputs": ["[[0, 0], [1, 1]]"], "fn_name": "f"}
MANY = {"inputs": [str(i) for i in range(12)], "outputs": [str(i) for i in range(12)]}
SPACED = {"inputs": ["3"], "outputs": ["0\n1\n2\n"]}
BLOCK = "Here:\n```python\n{}\n```\nDone."
CODE = [
    (BLOCK.format("a, b = map(int, input().split())\nprint(a + b)"), SUM),
    (BLOCK.format("a, b = map(int, input().split())\nprint(abs(a) + abs(b))"), SUM),
    (BLOCK.format("import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit(1)"), SUM),
    (
        BLOCK.format("def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()"),
        SUM,
    ),
    (BLOCK.format("a, b = map(int, input().split())\nassert a < 4\nprint(a + b)"), SUM),
    (BLOCK.format("this is no program"), SUM),
    ("no block", SUM),
    ("a, b = map(int, input().split())\nprint(a + b)", SUM),
    (BLOCK.format("print(3)") + BLOCK.format("print(7)"), SUM),
    (BLOCK.format("print(int(input()) / 2 + 1e-9)"), HALF),
    (BLOCK.format("print(int(input()) / 2 + 1e-3)"), HALF),
    (BLOCK.format("print(f'{int(input()) / 2:.3f}')"), HALF),
    (BLOCK.format("n = int(input())\nprint(n if n < 10 else -1)"), MANY),
    (BLOCK.format("n = int(input())\nprint(n if n % 2 else -1)"), MANY),
    (BLOCK.format("for i in range(int(input())):\n    print(' ', i, ' ')"), SPACED),
    (BLOCK.format("for i in range(int(input())):\n    print(i, end='\\n\\n')"), SPACED),
    (BLOCK.format("for i in range(int(input())):\n    print(float(i))"), SPACED),
    (BLOCK.format("print(*range(int(input())))"), SPACED),
    (BLOCK.format("def f(a, b):\n    print('hello')\n    return a + [b]"), PAIRS),
    (BLOCK.format("class Solution:\n    def f(self, a, b):\n        return tuple(a + [b])"), PAIRS),
    (BLOCK.format("def f(a, b):\n    return [b] + a"), PAIRS),
    (BLOCK.format("def g(a, b):\n    return a"), PAIRS),
    (BLOCK.format("def f(a):\n    return Counter(a)"), COUNTS),
    (BLOCK.format("def f(a):\n    return set(a)"), COUNTS),
    (BLOCK.format("def f(n):\n    return [(i, i) for i in range(n)]"), ROWS),
    (BLOCK.format("def f(n):\n    return [(i, i) for i in range(n)]"), FLAT),
    (BLOCK.format("def f(a, b):\n    return a + [b]"), MORE),
]


def cases_of(rule: str, pairs: list[tuple[str, Any]], **kwargs: Any) -> dict[str, dict[str, Any]]:
    label = "".join(f"_{value}" for value in kwargs.values())
    return {
        f"{rule}{label}/{number:02}": {"rule": rule, "solution": solution, "truth": truth, "kwargs": kwargs}
        for number, (solution, truth) in enumerate(pairs)
    }


CASES = {
    **cases_of("gsm8k", GSM8K, method="strict", format_score=0.0),
    **cases_of("gsm8k", GSM8K, method="flexible", format_score=0.1),
    **cases_of("math_boxed", BOXES),
    **cases_of("math_dapo", DAPO),
    **cases_of("math_dapo", DAPO, strict_box_verify=True),
    **cases_of("geometry3k", GEOMETRY),
    **cases_of("geometry3k", GEOMETRY[:3], format_score=0.25),
    **cases_of("numina", NUMINA),
    **cases_of("search_r1", [(text, {"target": target}) for text, target in SEARCH]),
    **cases_of("math_verify", MATH_VERIFY),
    **cases_of("code", CODE),
}


def reference(name: str, inputs: dict[str, Any]) -> Any:
    """The score of verl's scorer, as float or dict."""
    from verl.utils.reward_score import (
        geo3k,
        gsm8k,
        math_dapo,
        math_reward,
        math_verify,
        prime_code,
        prime_math,
        search_r1_like_qa_em,
    )

    modules = {
        "gsm8k": gsm8k,
        "math_boxed": math_reward,
        "math_dapo": math_dapo,
        "geometry3k": geo3k,
        "numina": prime_math,
        "search_r1": search_r1_like_qa_em,
        "math_verify": math_verify,
    }
    solution, truth = inputs["solution"], inputs["truth"]
    if inputs["rule"] == "code":
        return float(prime_code.compute_score(solution, json.dumps(truth), continuous=True)[0])
    found = modules[inputs["rule"]].compute_score(solution, truth, **inputs["kwargs"])
    if isinstance(found, dict):
        return found
    return float(found[0]) if isinstance(found, tuple) else float(found)
