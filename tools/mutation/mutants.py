"""Mutants of hpcrl: cosmic-ray's operators at places that are code, and a fixed sample of them."""

from __future__ import annotations

import ast
import difflib
import hashlib
import random
import warnings
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

PACKAGES = ("algorithms", "batch", "config", "controller", "data", "engine", "rollout/engines/native")
LEAST = 3  # mutants of each package, where it has as many
END = 10**9  # after the last line of every file
LOGGERS = {"log", "_log", "logger", "_logger", "logging", "warnings"}
# binary operators of the same operands; each is replaced by others of its set only
ALIKE = (
    {"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod"},
    {"BitOr", "BitAnd", "BitXor"},
    {"LShift", "RShift"},
    {"Pow", "Mul"},
)
UNPACKING = {"dictorsetmaker", "parameters", "arglist", "atom", "testlist_comp", "testlist_star_expr"}

Place = tuple[int, int]  # line, column


@cache
def operators() -> dict[str, Any]:
    """cosmic-ray's by name, those left out that need arguments."""
    from cosmic_ray import plugins

    known = {name: plugins.get_operator(name) for name in plugins.operator_names() if is_of_use(name)}
    return {name: operator() for name, operator in sorted(known.items()) if not operator.arguments()}


def is_of_use(operator: str) -> bool:
    """Not `a & b` for `a + b`, which is a TypeError that any test finds, nor `is` for `==`, mostly the same."""
    kind, _, replaced = operator.partition("Operator_")
    old, _, new = replaced.partition("_")
    if kind.endswith("ReplaceBinary"):
        return any(old in alike and new in alike for alike in ALIKE)
    return {old, new} not in ({"Eq", "Is"}, {"NotEq", "IsNot"})


def sample(root: Path, count: int, seed: int) -> list[dict[str, Any]]:
    """`count` mutants of the checkout `root`, shared out to the packages by their lines of code."""
    files = {package: sorted((root / "hpcrl" / package).rglob("*.py")) for package in PACKAGES}
    weights = {package: sum(lines_of_code(path.read_text()) for path in files[package]) for package in PACKAGES}
    shares = shared_out(count, weights)
    return [
        mutant for package in PACKAGES for mutant in of_package(root, package, files[package], shares[package], seed)
    ]


def shared_out(count: int, weights: dict[str, int]) -> dict[str, int]:
    """`LEAST` to each, the others in proportion to the weights; the largest remainders are rounded up."""
    least = min(LEAST, count // len(weights))
    free, total = count - least * len(weights), sum(weights.values())
    exact = {name: free * weight / total for name, weight in weights.items()}
    shares = {name: least + int(value) for name, value in exact.items()}
    by_remainder = sorted(weights, key=lambda name: (int(exact[name]) - exact[name], name))
    for name in by_remainder[: count - sum(shares.values())]:
        shares[name] += 1
    return shares


def lines_of_code(source: str) -> int:
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in source.splitlines())


def of_package(root: Path, package: str, files: list[Path], count: int, seed: int) -> list[dict[str, Any]]:
    """A place is drawn first, then one of its mutants: an operator has eleven replacements, a constant two."""
    draw = random.Random(f"{seed}:{package}")
    places = [
        (path, place, mutations) for path in files for place, mutations in sorted(candidates(path.read_text()).items())
    ]
    draw.shuffle(places)
    mutants: list[dict[str, Any]] = []
    for path, place, mutations in places:
        if len(mutants) == count:
            break
        source = path.read_text()
        for operator, occurrence in draw.sample(mutations, len(mutations)):
            mutated = mutate(source, operator, occurrence)
            if mutated is not None and is_another_program(source, mutated):
                file = str(path.relative_to(root))
                mutants.append(
                    {
                        "package": package,
                        "file": file,
                        "line": place[0],
                        "operator": operator,
                        "occurrence": occurrence,
                        "sha256": digest(source),
                        "diff": diff(file, source, mutated),
                    }
                )
                break
    return sorted(
        mutants, key=lambda mutant: (mutant["file"], mutant["line"], mutant["operator"], mutant["occurrence"])
    )


def candidates(source: str) -> dict[Place, list[tuple[str, int]]]:
    """Place -> mutants (operator, occurrence), at places that are code that runs."""
    from cosmic_ray.ast import ast_nodes, get_ast

    excluded = not_mutated(source)
    executable = lines_with_code(compile(source, "source", "exec"))
    statements = Statements(source)
    mutants: dict[Place, list[tuple[str, int]]] = defaultdict(list)
    nodes = list(ast_nodes(get_ast(source)))
    for name, operator in operators().items():
        occurrence = -1
        for node in nodes:
            for start, _ in operator.mutation_positions(node):
                occurrence += 1
                unpacks = getattr(node, "value", "") in ("*", "**") and node.parent.type in UNPACKING
                if unpacks or any(first <= start < last for first, last in excluded):
                    continue
                first, last = statements.around(start[0])
                if executable.intersection(range(first, last + 1)):
                    mutants[start].append((name, occurrence))
    return mutants


def mutate(source: str, operator: str, occurrence: int) -> str | None:
    from cosmic_ray.mutating import mutate_code

    return mutate_code(source, operators()[operator], occurrence)


def is_another_program(source: str, mutated: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the mutant's style
            compile(mutated, "mutant", "exec")
        return ast.dump(ast.parse(source)) != ast.dump(ast.parse(mutated))
    except (SyntaxError, ValueError):
        return False


def diff(file: str, source: str, mutated: str) -> str:
    lines = difflib.unified_diff(source.splitlines(), mutated.splitlines(), f"a/{file}", f"b/{file}", "", "", 0, "")
    return "\n".join(lines)


def digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def lines_with_code(code: Any) -> set[int]:
    lines = {line for _, _, line in code.co_lines() if line is not None}
    return lines.union(*(lines_with_code(inner) for inner in code.co_consts if hasattr(inner, "co_lines")))


def not_mutated(source: str) -> list[tuple[Place, Place]]:
    """Type hints, what type checkers read, messages (text, arguments of errors and loggers), dataclass's options."""
    lines = source.splitlines()

    def span(first: ast.AST, last: ast.AST | None = None) -> tuple[Place, Place]:
        last = last or first
        ends = (first.lineno, first.col_offset), (last.end_lineno, last.end_col_offset)  # type: ignore[attr-defined]
        # ast counts bytes, parso characters
        return tuple((line, len(lines[line - 1].encode()[:column].decode())) for line, column in ends)  # type: ignore

    spans = []
    for node in ast.walk(ast.parse(source)):
        hints = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        spans += [span(hint) for hint in hints if isinstance(hint, ast.AST)]
        if isinstance(node, ast.JoinedStr):
            spans.append(span(node))
        elif isinstance(node, ast.Assert) and node.msg is not None:
            spans.append(span(node.msg))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            spans.append(span(node, node.body[-1]))
        elif isinstance(node, ast.Call) and (is_message(node.func) or ast.unparse(node.func) == "dataclass"):
            # of dataclass: frozen, eq, slots; they guard the code's authors, and nothing computes with them
            spans.append((span(node.func)[1], span(node)[1]))
    return spans


def is_message(called: ast.AST) -> bool:
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id in LOGGERS:
        return True
    name = getattr(called, "id", getattr(called, "attr", ""))
    return name == "print" or name.endswith(("Error", "Exit"))


class Statements:
    """The statements of a file: the lines of each, and what stands around those that run when it is imported."""

    def __init__(self, source: str) -> None:
        self.spans: list[tuple[int, int]] = []
        self.scopes: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.in_functions = 0  # bit n: line n is of a function's body
        self._visit(ast.parse(source), [(1, END)], inside=False)

    def around(self, line: int) -> tuple[int, int]:
        """First and last line of the innermost statement (of a compound one its head) that has `line`."""
        having = [span for span in self.spans if span[0] <= line <= span[1]]
        return min(having, key=lambda span: span[1] - span[0], default=(line, line))

    def wider(self, line: int) -> list[tuple[int, int]]:
        """For a statement that runs at import: its function or class, then the module; else empty."""
        return self.scopes.get(self.around(line), [])

    def _visit(self, node: ast.AST, scopes: list[tuple[int, int]], inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
                continue
            body = getattr(child, "body", None) or getattr(child, "cases", None)
            if isinstance(child, ast.match_case):
                first, end = child.pattern.lineno, child.body[-1].end_lineno
            else:
                decorators = getattr(child, "decorator_list", [])
                first, end = min([child.lineno, *(each.lineno for each in decorators)]), child.end_lineno
            assert end is not None
            head = (first, max(first, first_line(body[0]) - 1) if body else end)
            below, within = scopes, inside
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                below = [(first, end), *scopes]
            self.spans.append(head)
            if not inside:
                self.scopes[head] = below
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                within = True
                for line in range(first_line(child.body[0]), end + 1):
                    self.in_functions |= 1 << line
            self._visit(child, below, within)


def first_line(node: Any) -> int:
    if isinstance(node, ast.match_case):
        return node.pattern.lineno
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
