r"""LaTeX of an answer as plain text: fractions, roots, Greek letters and signs; what is unknown disappears."""

from __future__ import annotations

import re

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
