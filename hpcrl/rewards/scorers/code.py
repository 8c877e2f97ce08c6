"""Programs against test cases (codecontests, apps, codeforces, taco): the fraction of tests that pass, in a sandbox."""

from __future__ import annotations

import json
import math
import secrets
from typing import Any

from hpcrl.rewards.registry import reads
from hpcrl.sandbox.program import Limits, run_python

NUM_TESTS = 10
FUNCTION_SECONDS = 6.0  # for all calls together
ABSOLUTE, RELATIVE = 1e-8, 1e-5  # numpy.allclose's

# What programs in these data sets take for granted, later names over earlier ones.
STARS = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json "
    "builtins typing"
).split()
MODULES = STARS[:16]
PREAMBLE = "".join(
    [
        *(f"from {name} import *\n" for name in STARS),
        f"import {', '.join(MODULES)}\n",
        "sys.setrecursionlimit(600000)\n",
    ]
)

# Runs in the sandbox after assignments to PROGRAM, PREAMBLE, METHOD and MARK; has no access to what a test expects.
JUDGE = """
def judge(program, preamble, method, mark):
    import json, os, sys, types
    if not method:
        exec(preamble, globals())
        try:
            exec(compile(program, "solution.py", "exec"), globals())
        except SystemExit:
            pass
        return
    dumps, output = json.dumps, os.dup(1)
    calls = [with_whole_keys([json.loads(line) for line in text.split("\\n")]) for text in json.load(sys.stdin)]
    module = sys.modules["solution"] = types.ModuleType("solution")
    exec(preamble, module.__dict__)
    exec(compile(program, "solution.py", "exec"), module.__dict__)
    owner = module.Solution() if "class Solution" in program else module
    for arguments in calls:
        found = getattr(owner, method)(*arguments)
        dumps(found)
        os.write(output, (mark + dumps(tagged(found)) + "\\n").encode())

def with_whole_keys(arguments):
    try:
        return [{int(key): value for key, value in arguments[0].items()}]
    except Exception:
        return arguments

def tagged(value):
    if isinstance(value, dict):
        return {"dict": [[tagged(key), tagged(item)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"tuple" if isinstance(value, tuple) else "list": [tagged(item) for item in value]}
    return value

judge(PROGRAM, PREAMBLE, METHOD, MARK)
"""


def tests(value: Any) -> dict[str, Any]:
    """{"inputs": [...], "outputs": [...]} as dict or JSON, texts for standard input and output; with "fn_name", lines
    of JSON arguments and a JSON result of that function, or method of `class Solution`."""
    try:
        cases = json.loads(value) if isinstance(value, str) else value
        inputs, outputs = cases["inputs"], cases["outputs"]
        if isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs) > 0:
            list(map(lines, [*inputs, *outputs]))
            return cases
    except (TypeError, ValueError, KeyError, RecursionError):
        pass
    raise ValueError("expected {inputs: [...], outputs: [...]} of one length, texts, or its JSON text")


@reads(tests)
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: dict[str, Any],
    *,
    seconds_per_test: float = 10.0,
    sandbox: str = "required",
    **_: Any,
) -> float:
    """The fraction of the first ten tests that the program in the last ```python block passes; a function all or none.

    verl's `reward_score/prime_code` with continuous=True (Hendrycks et al. 2021, "Measuring Coding Challenge Competence
    With APPS"), quirks included: a program's tests after the tenth never count; a function scores 1 if it passes all
    tests within 6 s, else 0, for 0.9.1 forgets the name when it runs them one by one; imports may be lacking; outputs
    are equal up to blank lines and spaces around lines, or as numbers to 1e-5, one on each line; a function's result
    may also equal the first element of what is expected.

    verl makes a program the body of a function in its own process, with strings for files; here it is a process of its
    own. So what fails there passes here: `global`, sys.stdin.buffer, exit(), EOFError at the end of the input, inputs
    that are lists of lines. And what passes there fails here: `return` outside a function, any file as if it were the
    input, more than 1 GB of memory.

    Raises SandboxUnavailable where the kernel cannot isolate the program, unless `sandbox` is "best_effort".

    Up to ten times `seconds_per_test` may pass: reward.timeout must allow for that, or a slow program scores 0.
    """
    best_effort = sandbox == "best_effort"
    program = solution_str.split("```python")[-1].split("```")[0]
    inputs, outputs = (list(map(lines, ground_truth[name])) for name in ("inputs", "outputs"))
    if method := ground_truth.get("fn_name"):
        return float(function_passes(program, method, inputs, outputs, best_effort))
    cases = list(zip(inputs, outputs, strict=True))[:NUM_TESTS]
    return sum(program_passes(program, *case, seconds_per_test, best_effort) for case in cases) / len(cases)


def tests_with_output(value: Any) -> dict[str, Any]:
    """`tests`, without those whose output is empty: each program that prints nothing passes them."""
    all_tests = tests(value)
    cases = [case for case in zip(all_tests["inputs"], all_tests["outputs"], strict=True) if lines(case[1]).strip()]
    if not cases:
        raise ValueError("expected a test whose output is not empty")
    inputs, outputs = map(list, zip(*cases, strict=True))
    return all_tests | {"inputs": inputs, "outputs": outputs}


@reads(tests_with_output)
def compute_score_strict(data_source: str, solution_str: str, ground_truth: dict[str, Any], **options: Any) -> float:
    """As `compute_score`, on the tests that expect an output."""
    return compute_score(data_source, solution_str, ground_truth, **options)


def lines(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "\n".join(text)


def program_passes(program: str, given: str, expected: str, seconds: float, best_effort: bool) -> bool:
    ran = run_python(source_of(program, None, ""), given, limits_for(seconds, [expected]), best_effort=best_effort)
    return ran.fate == "ok" and same_output(ran.stdout, expected)


def function_passes(program: str, method: str, inputs: list[str], outputs: list[str], best_effort: bool) -> bool:
    mark = secrets.token_hex(16)  # the program cannot guess it: what it prints is not a result
    limits = limits_for(FUNCTION_SECONDS, outputs)
    ran = run_python(source_of(program, method, mark), json.dumps(inputs), limits, best_effort=best_effort)
    results = [part.partition("\n")[0] for part in ran.stdout.split(mark)[1:]]
    if ran.fate != "ok" or len(results) != len(outputs):
        return False
    try:
        return all(
            same_value(untagged(json.loads(result)), json.loads(expected))
            for result, expected in zip(results, outputs, strict=True)
        )
    except (ValueError, TypeError, RecursionError):  # the program wrote results of its own
        return False


def limits_for(seconds: float, outputs: list[str]) -> Limits:
    """The sandbox's, with room for what is expected."""
    return Limits(seconds, stdout_kb=1024 + sum(map(len, outputs)) // 256)


def source_of(program: str, method: str | None, mark: str) -> str:
    names = {"PROGRAM": program, "PREAMBLE": PREAMBLE, "METHOD": method, "MARK": mark}
    return "".join(f"{name} = {value!r}\n" for name, value in names.items()) + JUDGE


def same_output(output: str, expected: str) -> bool:
    """Equal but for space around lines, or for blank lines; or numbers, one on a line, that are close."""
    output_lines = output.splitlines()
    if expected.strip() in ("\n".join(output_lines).strip(), "\n".join(line.strip() for line in output_lines).strip()):
        return True
    expected_lines = [line.strip() for line in expected.split("\n") if line]
    filled_lines = [line for line in output_lines if line]
    return expected_lines in (output_lines, filled_lines) or close(filled_lines, expected_lines)


def close(given: list[str], expected: list[str]) -> bool:
    """Numbers, not all of them whole, that agree as numpy.allclose has it."""
    if len(given) != len(expected) or all(a.isdigit() and b.isdigit() for a, b in zip(given, expected, strict=True)):
        return False
    try:
        pairs = [(float(a), float(b)) for a, b in zip(given, expected, strict=True)]
    except ValueError:
        return False
    return all(a == b or (math.isfinite(b) and abs(a - b) <= ABSOLUTE + RELATIVE * abs(b)) for a, b in pairs)


def same_value(result: Any, expected: Any) -> bool:
    """Equal to the expected value or to its first element; keys that JSON made texts are whole numbers again."""
    expected = whole_keys(expected)
    if isinstance(result, tuple):
        result = list(result)
    if result == expected:
        return True
    if not isinstance(expected, list) or not expected:
        return False
    if result == expected[0]:
        return True
    rows = result if isinstance(result, list) and result and isinstance(result[0], tuple) else []
    return all(isinstance(row, (list, tuple)) for row in rows) and list(map(list, rows)) == expected[0] != []


def whole_keys(expected: Any) -> Any:
    """A dict, or a list that begins with one, as a list of that dict with its keys as whole numbers, if they are."""
    head = expected[0] if isinstance(expected, list) and expected else expected
    if not isinstance(head, dict):
        return expected
    try:
        return [{int(key): value for key, value in head.items()}]
    except ValueError:
        return expected


def untagged(value: Any) -> Any:
    """A result as the program returned it, with tuples and keys that JSON does not have."""
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind == "dict":
        return {untagged(key): untagged(item) for key, item in items}
    return (tuple if kind == "tuple" else list)(untagged(item) for item in items)
