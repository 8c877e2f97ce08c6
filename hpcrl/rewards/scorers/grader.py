"""Comparison of an answer with the ground truth: the same spelling, or the same value."""

from __future__ import annotations

import re
from typing import Any, Literal

from hpcrl.rewards.registry import as_text_or_number, reads
from hpcrl.rewards.scorers import algebra, limits
from hpcrl.rewards.scorers.math_answers import UnusualSpelling, last_box, math_spelling

MAX_DEPTH = 64  # nested braces; bounds the recursion
TOKEN = re.compile(r"\\[A-Za-z]+\s*|\\\\\*?|\\.|%[^\n]*\n?|--|[^\\]", re.DOTALL)

NAMES_AND_SIGNS = """
alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ iota ι kappa κ lambda λ mu μ nu ν xi ξ pi π
rho ρ sigma σ tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ
Phi Φ Psi Ψ Omega Ω infty ∞ cup ∪ cap ∩ cdot · times × div ÷ pm ± mp ∓ ast ∗ star ⋆ circ ∘ angle ∠ perp ⊥ parallel ∥
sim ∼ approx ≈ cong ≅ equiv ≡ leq ≤ le ≤ geq ≥ ge ≥ in ∈ subset ⊂ emptyset ∅ to → rightarrow → ldots … dots … cdots ⋯
prime ' partial ∂ nabla ∇ sum ∑ prod ∏ int ∫ forall ∀ exists ∃ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ langle ⟨ rangle ⟩
sin sin cos cos tan tan cot cot arcsin arcsin arccos arccos arctan arctan log log ln ln exp exp max max min min
""".split()
SPACES = {" ": " ", ",": " ", ";": " ", ":": " ", "quad": "  ", "qquad": "    ", "\\": "\n"}
SYMBOLS = SPACES | dict(zip(NAMES_AND_SIGNS[::2], NAMES_AND_SIGNS[1::2], strict=True))
CHARACTERS = {"~": "\N{NO-BREAK SPACE}", "--": "–", "&": "   "}

BARE_FRACTION = "%s/%s"  # pylatexenc's template, which shows where a fraction has no arguments


class NotLatex(ValueError):
    """A root with nothing under it, or braces nested too deep."""


def latex_text(text: str) -> str:
    r"""`\frac{a}{b}` as `a/b`, `\sqrt{a}` as `√(a)`, symbols as Unicode; other commands and all braces vanish.

    The results are those of pylatexenc 2's `latex_to_text` on what answers are written with. Quirks kept: no
    parentheses around a numerator or denominator, so `\frac{1+x}{2}` is `1+x/2`; the degree of a root is lost; `\dfrac`
    is unknown and loses its line; `\mbox` loses its text; spaces after a command go with it. Raises NotLatex.
    """
    tokens = TOKEN.findall(text)
    tokens.reverse()
    return "".join(_item(tokens, 0) for _ in iter(lambda: bool(tokens), False))


def _item(tokens: list[str], depth: int) -> str:
    """The text of the next token, with the arguments that it takes."""
    if depth > MAX_DEPTH:
        raise NotLatex(f"braces nested deeper than {MAX_DEPTH}")
    token = tokens.pop()
    if token == "{":
        return _group(tokens, depth)
    if token == "}" or token[0] == "%":
        return ""
    if token[0] != "\\" or len(token) == 1:
        return CHARACTERS.get(token, "" if token == "\\" else token)
    name = token[1:].rstrip() or token[1:]
    if name == "frac":
        if not tokens:
            return BARE_FRACTION
        return f"{_argument(tokens, depth)}/{_argument(tokens, depth)}"
    if name == "sqrt":
        if tokens and tokens[-1] == "[":
            while tokens and tokens.pop() != "]":
                pass
        return f"√({_argument(tokens, depth)})"
    if name == "mbox":
        _argument(tokens, depth)
        return ""
    if name in SYMBOLS:
        return SYMBOLS[name]
    return name if len(name) == 1 and not name.isalpha() and name not in "!|()[]/" else ""


def _group(tokens: list[str], depth: int) -> str:
    parts: list[str] = []
    while tokens and tokens[-1] != "}":
        parts.append(_item(tokens, depth + 1))
    if tokens:
        tokens.pop()
    return "".join(parts)


def _argument(tokens: list[str], depth: int) -> str:
    while tokens and tokens[-1].isspace():
        tokens.pop()
    if not tokens or tokens[-1] == "}":
        raise NotLatex("a fraction or a root lacks its argument")
    if tokens[-1].rstrip() == r"\sqrt":
        raise NotLatex("a root as an argument needs braces")
    if tokens[-1].rstrip() == r"\frac":
        tokens.pop()
        return BARE_FRACTION
    return _item(tokens, depth + 1)


# Which of the two programs that verl uses is followed; they differ in a few spellings.
Flavour = Literal["mathruler", "prime"]

TEXT = re.compile(r"\\text\{(.+?)\}$")
UNITS = "degree cm centimeter meter mile second minute hour day week month year foot feet inch yard".split()
UNIT_PATTERNS = {
    "mathruler": [re.compile(rf"{unit}(?:es)?s? *(?:\^[0-9]+)?") for unit in UNITS],
    "prime": [re.compile(rf"{unit}(?:es)?s? *(?:\^[0-9]+)?") for unit in [*UNITS, "liter"]],
}
WORDS = (
    (r"\%", "%"),
    (r"\$", "$"),
    ("$", ""),
    ("%", ""),
    (" or ", " , "),
    (" and ", " , "),
    ("million", "*10^6"),
    ("billion", "*10^9"),
    ("trillion", "*10^12"),
)
SIGNS = (("√", "sqrt"), ("π", "pi"), ("∞", "inf"), ("∪", "U"), ("·", "*"), ("×", "*"))
THOUSANDS = re.compile(r"(\d),(\d\d\d)($|\D)")
FRACTION = re.compile(r"-?[0-9]+.?/0*[1-9][0-9]*.?$")
BRACKETS = "()[]"
# sympy, on which both rely, might hang on these.
TOWERS = re.compile(r"\^[{(]|\^[0-9]+\^|\^[0-9][0-9]+")


def same_answer(answer: str, truth: str, flavour: Flavour) -> bool:
    """Equal as MATH answers, or after `plain`, or element by element as values.

    The rules of mathruler 0.1.0 and of verl's `reward_score/prime_math` (both after Lightman et al. 2023, "Let's Verify
    Step by Step", the released PRM800K grader), quirks included: the ground truth decides how strict it is, for a
    whole number is only equal to a whole number, and a fraction that is not reduced is not equal to the reduced one.
    They ask sympy whether the difference simplifies to 0; here both sides are evaluated to 60 digits at fixed points of
    their letters, without sympy and `eval`. That is the same but for expressions that are equal and that sympy does not
    simplify, and for decimals, which are exact here and binary there; complex numbers are never equal here.
    """
    if math_form(answer, flavour) == math_form(truth, flavour):
        return True
    given, expected = plain(answer, flavour), plain(truth, flavour)
    if given == expected:
        return True
    if not given:
        return False
    given_parts, expected_parts = parts(given), parts(expected)
    if len(given_parts) != len(expected_parts):
        return False
    if len(expected_parts) > 1 and (given[0], given[-1]) != (expected[0], expected[-1]):
        return False
    return all(map(same_element, given_parts, expected_parts))


def math_form(answer: str, flavour: Flavour) -> str:
    answer = answer.strip()
    text = TEXT.match(answer)
    try:
        answer = text[1].strip() if text else answer
        return math_spelling(answer, drop_percent=flavour == "mathruler")
    except UnusualSpelling:
        return answer


def plain(answer: str, flavour: Flavour) -> str:
    """An answer in lower case without units, LaTeX, and thousands commas, and a whole number in digits."""
    text = TEXT.match(answer)
    answer = text[1] if text else answer
    for before, after in WORDS:
        answer = answer.replace(before, after)
    for unit in UNIT_PATTERNS[flavour]:
        answer = unit.sub("", answer)
    answer = re.sub(r"\^ *\\circ", "", answer)
    if answer.startswith("{") and answer.endswith("}"):
        answer = answer[1:-1]
    answer = re.sub(r",\\! *", "", answer)
    number = whole_number(answer)
    if number is not None:
        answer = str(round(number))
    if "\\" in answer:
        answer = without_latex(answer)
    answer = re.sub("- *", "-", answer)
    answer = re.sub("([0-9]) +([0-9])", r"\1+\2", answer)
    if flavour == "mathruler":
        answer = answer.translate(str.maketrans("", "", " {}"))
    answer = answer.lower()
    if whole_number(without_thousands(answer)) is not None:
        answer = str(int(float(answer.replace(",", ""))))
    return answer


def without_latex(answer: str) -> str:
    """As plain text; unchanged where it is not LaTeX."""
    try:
        text = latex_text(re.sub(r"\\[td]?frac", r" \\frac", answer))
    except NotLatex:
        return answer
    for before, after in SIGNS:
        text = text.replace(before, after)
    return text.strip()


def whole_number(text: str) -> float | None:
    """The number that the text is, if that is whole to 1e-7."""
    try:
        number = float(text)
        return number if abs(number - round(number)) <= 1e-7 else None
    except (ValueError, OverflowError):
        return None


def without_thousands(text: str) -> str:
    """1,234 as 1234; a comma between other numbers stays."""
    while (shorter := THOUSANDS.sub(r"\1\2\3", text)) != text:
        text = shorter
    return text


def parts(text: str) -> list[str]:
    """The elements of a tuple or an interval; the text itself where it is neither."""
    text = without_thousands(text)
    if not text:
        return []
    inner = text[1:-1]
    if len(text) > 2 and text[0] in BRACKETS and text[-1] in BRACKETS and not any(sign in inner for sign in BRACKETS):
        return [part.strip() for part in inner.split(",")]
    return [text]


def same_element(given: str, expected: str) -> bool:
    if FRACTION.match(given) and FRACTION.match(expected):
        return given == expected
    if (whole_number(without_thousands(given)) is None) != (whole_number(without_thousands(expected)) is None):
        return False
    difference = f"({expected})-({given})"
    letters = {sign for sign in difference.replace("sqrt", "").replace("frac", "") if sign.isalpha()}
    if len(letters) > 2 or TOWERS.search(difference):
        return False
    return algebra.equal(given.replace("^", "**"), expected.replace("^", "**"))


NO_ANSWER = "None"


@reads(as_text_or_number)
def geometry3k(
    data_source: str, solution_str: str, ground_truth: str, *, format_score: float = 0.1, **_: Any
) -> float | dict[str, Any]:
    """(1 - format_score) x right + format_score x form.

    verl's `reward_score/geo3k.py` over mathruler 0.1.0; see `grader.same_answer` for what is right. Quirk: without a
    box the answer is "None".
    """
    right = same_answer(boxed_answer(solution_str), ground_truth, "mathruler")
    score = (1.0 - format_score) * right + format_score * has_form(solution_str)
    return score if right else limits.marked(score, last_box(solution_str), algebra.MAX_LENGTH, MAX_DEPTH)


def boxed_answer(text: str) -> str:
    box = last_box(text)
    return NO_ANSWER if box is None else box.strip()


def has_form(text: str) -> bool:
    r"""Whether it is `<think>...</think>...\boxed{...}...`; in linear time."""
    place = 0
    for part in ("<think>", "</think>", r"\boxed{", "}"):
        found = text.find(part, place)
        if found < 0 or (part == "<think>" and found > 0):
            return False
        place = found + len(part)
    return True
