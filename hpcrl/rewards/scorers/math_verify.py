"""Mathematics by the library math-verify, which parses LaTeX and compares with sympy; needs `hpcrl[math]`."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> float:
    """1 if one of the answers that the library finds equals the ground truth, else 0.

    verl's `reward_score/math_verify.py`: the ground truth is read as LaTeX in a box, the response as LaTeX or as a
    plain expression. The library stops its own parsing after 5 s by SIGALRM, which needs the main thread of a process;
    what it cannot stop, the scoring process's own limit does.
    """
    from math_verify.errors import TimeoutException
    from math_verify.grader import verify
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig, parse

    try:
        golden = parse(rf"\boxed{{{ground_truth}}}", (LatexExtractionConfig(),))
        found = parse(solution_str, (ExprExtractionConfig(), LatexExtractionConfig()))
        return float(any(verify(truth, answer) for answer in found for truth in golden))
    except TimeoutException:
        return 0.0
