"""Whether two expressions that a model wrote have the same value; nothing is evaluated as code.

Numbers, letters, + - * / ** ! !! ( ), sqrt, ln and pi, with the multiplication sign left out as people do: 2sqrt(3)x.
"""

from __future__ import annotations

import decimal
import math
import re
import unicodedata
from decimal import Decimal
from hashlib import blake2b

MAX_LENGTH = 400  # characters; a longer expression is not an answer
MAX_DEPTH = 64  # nested parentheses and signs; bounds the recursion
MAX_FACTORIAL = 1000
DIGITS = 60
TOLERANCE = Decimal("1e-45")
CONTEXT = decimal.Context(
    prec=DIGITS, Emax=9999, Emin=-9999, traps=[decimal.InvalidOperation, decimal.DivisionByZero, decimal.Overflow]
)
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
TOKEN = re.compile(r"\s*(?:((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)|([^\W\d]\w*)|(\*\*|!!|[-+*/()!]))")
FUNCTIONS = {"sqrt": CONTEXT.sqrt, "ln": CONTEXT.ln, "log": CONTEXT.ln, "exp": CONTEXT.exp}
CONSTANTS = {"pi": PI}
# Signs of the letters at the three points at which expressions are compared: by letter at the middle one.
POINTS = ("positive", "mixed", "negative")


class NotAnExpression(ValueError):
    """The text does not follow the grammar, or has no real value."""


def equal(left: str, right: str) -> bool:
    """Whether the two agree, to 45 digits, at three fixed points of their letters.

    Points where one of them has no real value do not count; one must be left. Letters are as good as random there, so
    that expressions which agree are the same function.
    """
    try:
        pairs = [
            (a, b)
            for point in (POINTS if has_letters(left + right) else POINTS[:1])
            if (a := value_or_none(left, point)) is not None and (b := value_or_none(right, point)) is not None
        ]
    except NotAnExpression:
        return False
    return bool(pairs) and all(abs(a - b) <= TOLERANCE * max(Decimal(1), abs(a), abs(b)) for a, b in pairs)


def has_letters(text: str) -> bool:
    return any(character.isalpha() for character in text)


def value_or_none(text: str, point: str) -> Decimal | None:
    """The value at a point; None where there is none; NotAnExpression where the text follows no grammar."""
    try:
        return value(text, point)
    except ArithmeticError:
        return None


def value(text: str, point: str = POINTS[0]) -> Decimal:
    """The value of `text` with its letters at `point`.

    Raises NotAnExpression for what is not of the grammar, ArithmeticError for
    a division by zero, an overflow, or a value that is not real.
    """
    if len(text) > MAX_LENGTH:
        raise NotAnExpression(f"{len(text)} characters; at most {MAX_LENGTH}")
    parser = _Parser(tokens(text), point)
    with decimal.localcontext(CONTEXT):
        result = parser.sum(0)
    if parser.place < len(parser.tokens):
        raise NotAnExpression(f"{parser.tokens[parser.place]!r} not expected")
    return result


def tokens(text: str) -> list[str]:
    """Numbers, names and operators; a name of several letters is their product: `xy`, `x2`."""
    parts: list[str] = []
    place = 0
    text = text.rstrip()
    while place < len(text):
        token = TOKEN.match(text, place)
        if token is None:
            raise NotAnExpression(f"{text[place]!r} at {place}")
        name = token[2]
        if name and not is_one_name(name):
            parts += re.findall(r"[0-9]+|[^0-9]", name)
        else:
            parts.append(token[token.lastindex or 0])
        place = token.end()
    return parts


def is_one_name(name: str) -> bool:
    """A function, a constant, a Greek letter, or a name with a subscript."""
    if name in FUNCTIONS or name in CONSTANTS or "_" in name:
        return True
    try:
        unicodedata.lookup(f"GREEK SMALL LETTER {name}")
    except KeyError:
        return len(name) == 1
    return True


def letter(name: str, point: str) -> Decimal:
    """A number between 1/2 and 3/2, the same at every call, with the sign that the point gives it."""
    word = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")
    size = Decimal(1) / 2 + Decimal(word) / 2**64
    return -size if point == "negative" or (point == "mixed" and word % 2) else size


class _Parser:
    """Recursive descent; each method reads one rule from `place` on and returns its value.

    sum = product (("+" | "-") product)*; product = signed (["*" | "/"] signed)*; signed = ("+" | "-") signed | power;
    power = atom ("!" | "!!")* ["**" signed]; atom = number | constant | letter | function "(" sum ")" | "(" sum ")".
    """

    def __init__(self, tokens: list[str], point: str) -> None:
        self.tokens = tokens
        self.place = 0
        self.point = point

    def next(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def accept(self, *operators: str) -> str:
        if self.next() not in operators:
            return ""
        self.place += 1
        return self.tokens[self.place - 1]

    def sum(self, depth: int) -> Decimal:
        total = self.product(depth)
        while operator := self.accept("+", "-"):
            right = self.product(depth)
            total = total + right if operator == "+" else total - right
        return total

    def product(self, depth: int) -> Decimal:
        found = self.signed(depth)
        while True:
            if operator := self.accept("*", "/"):
                right = self.signed(depth)
                found = found * right if operator == "*" else found / right
            elif self.starts_factor():
                found *= self.power(depth)
            else:
                return found

    def starts_factor(self) -> bool:
        """Whether a factor follows without a sign; two numbers side by side are none."""
        token = self.next()
        if token[:1].isdigit() or token[:1] == ".":
            return not (self.tokens[self.place - 1][-1:].isdigit())
        return token == "(" or token[:1].isalpha()

    def signed(self, depth: int) -> Decimal:
        if depth > MAX_DEPTH:
            raise NotAnExpression(f"nested deeper than {MAX_DEPTH}")
        if sign := self.accept("+", "-"):
            operand = self.signed(depth + 1)
            return -operand if sign == "-" else operand
        return self.power(depth)

    def power(self, depth: int) -> Decimal:
        base = self.atom(depth)
        while marks := self.accept("!", "!!"):
            base = factorial(base, step=len(marks))
        if self.accept("**"):
            exponent = self.signed(depth + 1)
            return Decimal(1) if exponent == 0 else base**exponent
        return base

    def atom(self, depth: int) -> Decimal:
        token = self.next()
        self.place += 1
        if token == "(":
            return self.inside(depth)
        if token[:1].isdigit() or token[:1] == ".":
            return CONTEXT.create_decimal(token)
        if token in FUNCTIONS:
            if not self.accept("("):
                raise NotAnExpression(f"{token} without parentheses")
            return FUNCTIONS[token](self.inside(depth))
        if token in CONSTANTS:
            return CONSTANTS[token]
        if not token[:1].isalpha():
            raise NotAnExpression(f"{token!r} not expected")
        return letter(token, self.point)

    def inside(self, depth: int) -> Decimal:
        result = self.sum(depth + 1)
        if not self.accept(")"):
            raise NotAnExpression("no ')'")
        return result


def factorial(number: Decimal, step: int) -> Decimal:
    """number x (number - step) x ... down to 1."""
    if number != number.to_integral_value() or not 0 <= number <= MAX_FACTORIAL:
        raise NotAnExpression(f"{number}! is not computed")
    return CONTEXT.create_decimal(math.prod(range(int(number), 0, -step)))
