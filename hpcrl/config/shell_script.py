"""The part of bash in which launch scripts are written, read without running anything.

Variables, arrays, quotes, defaults, integer arithmetic and simple tests are evaluated. A value that only a run could
give is `Unknown`, which matters only where the command that is looked for uses it.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from hpcrl.config.yaml_core import ConfigError


class Unknown(NamedTuple):
    """A value that cannot be read. name: of the variable by which the user can give it."""

    reason: str
    name: str = ""

    def __str__(self) -> str:
        how = f"give it with --set {self.name}=VALUE" if self.name else "write its value there"
        return f"{self.reason}; {how}"


Field = str | Unknown
Truth = bool | Unknown


class Token(NamedTuple):
    text: str
    line: int
    kind: str = "word"  # or "array", the start of NAME=( ... ), or "operator"


class Argument(NamedTuple):
    text: str
    line: int


class Command(NamedTuple):
    """A Python program that the script starts. module: what follows -m, or the path of a file."""

    module: str
    line: int
    arguments: list[Argument]


OPERATOR = re.compile(r"&>>?|\d*(?:<<<|<<-?|>>|[<>]&?)|&&|\|\||;;|[;&|()\n]")
REDIRECTS = re.compile(r"&>>?|\d*[<>].*")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
DANGLING = re.compile(r"[+~]*[a-z_]\w*(\.\w+)+=")
PARAMETER = re.compile(r"(\w+|[@*])(?:\[([^]]*)\])?(.*)", re.DOTALL)
DECLARES = ("export", "readonly", "declare", "local", "typeset")
LOOPS = {"for": "done", "while": "done", "until": "done", "select": "done", "case": "esac"}
FROM_ENVIRONMENT = ("HOME", "USER", "PWD")
MATHS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
COMPARISONS = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


def read_commands(text: str, file: str, given: Mapping[str, str]) -> tuple[list[Command], list[str]]:
    """The Python programs that a script starts, and a line for each argument that belongs to no command.

    Raises ConfigError, a line for each value that cannot be read.

    Args:
        given: variables whose values replace those of the script.
    """
    try:
        script = Script(text, file, given)
        script.statements(())
    except RecursionError:
        raise ConfigError(f"{file}: blocks or expansions are nested too deep; expected a launch script") from None
    if script.problems:
        raise ConfigError(*dict.fromkeys(script.problems))
    return script.commands, script.dangling


class Script:
    def __init__(self, text: str, file: str, given: Mapping[str, str], first_line: int = 1):
        self.file, self.given, self.line = file, given, first_line
        self.values: dict[str, Field | list[Field]] = {}
        self.commands: list[Command] = []
        self.problems: list[str] = []
        self.dangling: list[str] = []
        self.state: Truth = True  # whether the script gets to this place
        self.unset_is_empty = False
        self.tokens = list(self.tokenized(text))
        self.next = 0

    def place(self) -> str:
        return f"{self.file}:{self.line}"

    # tokens

    def tokenized(self, text: str) -> Iterator[Token]:
        index, line, here_documents = 0, self.line, []
        while index < len(text):
            self.line = line
            start = index
            if text[index] in " \t\r" or text.startswith("\\\n", index):
                index += 2 if text[index] == "\\" else 1
            elif text[index] == "#":
                index = (text.find("\n", index) + 1 or len(text) + 1) - 1
            elif match := OPERATOR.match(text, index):
                index = match.end()
                if match[0].lstrip("0123456789") in ("<<", "<<-"):
                    end = self.end_of_word(text, index + len(text[index:]) - len(text[index:].lstrip(" ")))
                    here_documents.append(text[index:end].strip(" '\"\\"))
                yield Token(match[0], line, "operator")
                if match[0] == "\n":
                    for end_mark in here_documents:
                        rest = re.compile(rf"^\t*{re.escape(end_mark)}$", re.MULTILINE).search(text, index)
                        index = rest.end() if rest else len(text)
                    here_documents = []
            else:
                index = self.end_of_word(text, index)
                is_array = text[index : index + 1] == "(" and ASSIGNMENT.fullmatch(text[start:index])
                yield Token(text[start:index], line, "array" if is_array else "word")
            line += text.count("\n", start, index)
        yield Token("\n", line, "operator")

    def end_of_word(self, text: str, index: int) -> int:
        while index < len(text) and text[index] not in " \t\r\n;&|()<>":
            index = self.after(text, index)
        return index

    def after(self, text: str, index: int, end: str = "") -> int:
        """The index after the character, quotation or expansion that begins here.

        Args:
            end: the end of the quotation or expansion that it stands in.
        """
        char = text[index]
        if char == "\\":
            return index + 2
        if char in "'`" and end != '"' or char == "`":
            return self.closing(text, index + 1, char, raw=True)
        if char == '"':
            return self.closing(text, index + 1, '"')
        if text.startswith(("$(", "${"), index):
            return self.closing(text, index + 2, ")" if text[index + 1] == "(" else "}")
        if char == "(" and end == ")":
            return self.closing(text, index + 1, ")")
        return index + 1

    def closing(self, text: str, index: int, end: str, raw: bool = False) -> int:
        """The index after `end`, which closes what is open here."""
        while index < len(text):
            if text[index] == end:
                return index + 1
            index = index + 1 if raw else self.after(text, index, end)
        raise ConfigError(f"{self.place()}: {end} is missing; close the quotation or expansion that begins here")

    # statements

    def statements(self, ends: Sequence[str]) -> str:
        """Read statements until one of the words `ends`; returns it, or "" at the end of the script."""
        result: Truth = True
        joined = ""
        while self.next < len(self.tokens):
            token = self.tokens[self.next]
            self.line = token.line
            if token.kind == "operator":
                self.next += 1
                joined = token.text
                continue
            if token.text in ends:
                self.next += 1
                return token.text
            if token.text in ("do", "then", "else", "{", "}", "!", "time"):
                self.next += 1
            elif token.text == "if":
                self.if_block()
            elif token.text in LOOPS:
                self.next += 1
                self.within(Unknown(f"{self.place()}: it is set inside `{token.text}`"), (LOOPS[token.text],))
            elif token.text == "function" or [t.text for t in self.tokens[self.next + 1 : self.next + 3]] == ["(", ")"]:
                self.next += 2 if token.text == "function" else 3
                self.within(Unknown(f"{self.place()}: it is set inside a function"), ("}",))
            else:
                chained = result if joined == "&&" else opposite(result) if joined == "||" else True
                result = self.simple_command(chained)
            joined = ""
        return ""

    def within(self, condition: Truth, ends: Sequence[str]) -> str:
        """Read statements that the script gets to under a condition."""
        outer = self.state
        self.state = both(outer, condition)
        end = self.statements(ends)
        self.state = outer
        return end

    def if_block(self) -> None:
        remaining: Truth = True
        end = "if"
        while end not in ("fi", ""):
            if end == "else":
                condition: Truth = True
            else:
                self.next += end == "if"
                condition = self.condition()
            branch = both(remaining, condition)
            remaining = both(remaining, opposite(condition))
            end = self.within(branch, ("elif", "else", "fi"))

    def condition(self) -> Truth:
        start = self.next
        while self.next < len(self.tokens) and self.tokens[self.next].text != "then":
            self.next += 1
        words = [token for token in self.tokens[start : self.next] if token.text not in (";", "\n")]
        self.next += 1
        return self.truth(words)

    def truth(self, words: Sequence[Token]) -> Truth:
        """Whether [ WORDS ] or [[ WORDS ]] holds; Unknown for other commands and for tests of files."""
        unknown = Unknown(f"{self.place()}: it depends on a condition that cannot be read here")
        texts = [token.text for token in words]
        if not texts or texts[0] not in ("[", "[[", "test") or any(token.kind != "word" for token in words):
            return unknown
        self.unset_is_empty = True
        fields = [field for token in words[1 : None if texts[0] == "test" else -1] for field in self.fields(token)]
        self.unset_is_empty = False
        for field in fields:
            if isinstance(field, Unknown):
                return field
        plain = [str(field) for field in fields]
        negated = plain[:1] == ["!"]
        plain = plain[negated:]
        if len(plain) == 3 and plain[1] in ("=", "==", "!="):
            holds = fnmatch.fnmatchcase(plain[0], plain[2]) == (plain[1] != "!=")
        elif len(plain) == 3 and plain[1] in COMPARISONS and all(re.fullmatch(r"-?\d+", plain[at]) for at in (0, 2)):
            holds = COMPARISONS[plain[1]](int(plain[0]), int(plain[2]))
        elif len(plain) <= 2 and plain[:1] in (["-z"], ["-n"]):
            holds = (plain[0] == "-z") == (not any(plain[1:]))
        elif len(plain) == 1:
            holds = bool(plain[0])
        else:
            return unknown
        return holds != negated

    def simple_command(self, chained: Truth) -> Truth:
        """Read a command up to the operator that ends it; returns what is known of its exit status."""
        words: list[Token] = []
        state = both(self.state, chained)
        while (token := self.tokens[self.next]).kind != "operator" or REDIRECTS.fullmatch(token.text):
            self.next += 1
            if token.kind == "operator":
                self.next += self.tokens[self.next].kind == "word"
            elif token.kind == "array":
                self.assign(token.text, self.array(), state)
            else:
                words.append(token)
        while words and words[0].text in DECLARES or words and words[0].text.startswith("-") and len(words) > 1:
            words = words[1:]
        leading = 0
        while leading < len(words) and (match := ASSIGNMENT.match(words[leading].text)):
            self.line = words[leading].line
            self.assign(match[0], self.joined(words[leading].text[match.end() :]), state)
            leading += 1
        words = words[leading:]
        if not words or state is False:
            return True
        self.line = words[0].line
        if words[0].text in ("[", "[[", "test"):
            return self.truth(words)
        if words[0].text == "exit" and state is True and not self.commands:
            self.problems.append(f"{self.place()}: the script ends here, before it trains; see the condition above it")
        if DANGLING.match(words[0].text):
            self.dangling.append(
                f"{self.place()}: {words[0].text.split('=')[0]} is not part of a command: a comment, or a line that "
                "does not end with \\, ends the command before it"
            )
        self.program(words, state if chained is True or isinstance(self.state, Unknown) else True)
        return Unknown(f"{self.place()}: it depends on what a command returns")

    def array(self) -> list[Field]:
        """The elements of NAME=( ... ), from the opening bracket."""
        elements: list[Field] = []
        self.next += 1
        while self.tokens[self.next].text != ")" and self.next + 1 < len(self.tokens):
            if self.tokens[self.next].kind == "word":
                self.line = self.tokens[self.next].line
                elements += self.fields(self.tokens[self.next])
            self.next += 1
        if self.tokens[self.next].text != ")":
            raise ConfigError(f"{self.place()}: ) is missing; close the array that begins here")
        self.next += 1
        return elements

    def assign(self, target: str, value: Field | list[Field], state: Truth) -> None:
        name, adds = target.rstrip("+="), target.endswith("+=")
        if state is False or name in self.given:
            return
        if isinstance(state, Unknown):
            value = Unknown(state.reason, name)
        elif isinstance(value, Unknown) and not value.name:
            value = Unknown(value.reason, name)
        elif adds and name in self.values:
            before = self.values[name]
            if isinstance(before, str) and isinstance(value, str):
                value = before + value
            elif isinstance(before, list):
                value = [*before, *(value if isinstance(value, list) else [value])]
            elif isinstance(before, Unknown):
                value = before
        self.values[name] = value

    def program(self, words: Sequence[Token], state: Truth) -> None:
        """Take note of a Python program among the words, which may follow a launcher, or be text for another shell."""
        fields = [(field, token.line) for token in words for field in self.fields(token)]
        texts = [str(field) for field, _ in fields]
        for index, text in enumerate(texts):
            is_module = texts[index - 1 : index] == ["-m"]
            if " " in text and re.search(r"-m\s+verl\.", text) and not isinstance(fields[index][0], Unknown):
                inner = Script(text, self.file, self.given, fields[index][1])
                inner.statements(())
                self.commands += inner.commands
                self.problems += inner.problems
                return
            if is_module or text.endswith(".py") and any("python" in before for before in texts[:index]):
                break
        else:
            return
        line = fields[index][1]
        if isinstance(state, Unknown) and re.match(r"(verl|recipe)\b", text):
            self.problems.append(f"{state.reason}, so is {text} in line {line}; put that command outside")
            return
        if re.fullmatch(r"verl\.trainer\.main_ppo", text):
            self.problems += [str(field) for field, _ in fields[index + 1 :] if isinstance(field, Unknown)]
        self.commands.append(Command(text, line, [Argument(str(field), at) for field, at in fields[index + 1 :]]))

    # expansion

    def fields(self, token: Token) -> list[Field]:
        """The arguments that a word becomes."""
        self.line = token.line
        fields: list[Field] = []
        current: Field | None = None

        def add(value: Field) -> None:
            nonlocal current
            if not isinstance(current, Unknown):
                current = value if isinstance(value, Unknown) else (current or "") + value

        for value, is_quoted in self.pieces(token.text):
            values = value if isinstance(value, list) else [value]
            if not is_quoted and not isinstance(value, list) and isinstance(value, str):
                values = list(re.split(r"\s+", value))
            for index, item in enumerate(values):
                if index:
                    fields += [] if current is None else [current]
                    current = None
                if is_quoted or isinstance(value, list) or item:
                    add(item)
        return fields if current is None else [*fields, current]

    def joined(self, raw: str) -> Field:
        """The value that an assignment of the word gives."""
        text = ""
        for value, _ in self.pieces(raw):
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, Unknown):
                    return item
                text += f" {item}" if isinstance(value, list) and text else item
        return text

    def pieces(self, raw: str, in_quotes: bool = False) -> Iterator[tuple[Field | list[Field], bool]]:
        """Parts of a word and whether each is quoted, so that it is not split; a list has arguments of its own."""
        index = 0
        while index < len(raw):
            char, end = raw[index], self.after(raw, index, '"' if in_quotes else "")
            inner = raw[index + 1 : end - 1]
            if char == "\\":
                escaped = raw[index + 1 : end]
                is_literal = in_quotes and escaped not in ("$", "`", '"', "\\", "\n")
                yield ("\\" if is_literal else "") + escaped.replace("\n", ""), True
            elif char == "'" and not in_quotes:
                yield inner, True
            elif char == '"':
                parts = list(self.pieces(inner, in_quotes=True))
                if not parts or any(not isinstance(value, list) for value, _ in parts):  # "$@" may be no argument
                    yield "", True
                yield from parts
            elif char == "`":
                yield self.printed(inner), in_quotes
            elif raw.startswith("$((", index):
                yield self.arithmetic(raw[index + 3 : end - 2]), in_quotes
            elif raw.startswith("$(", index):
                yield self.printed(raw[index + 2 : end - 1]), in_quotes
            elif raw.startswith("${", index):
                yield self.parameter(raw[index + 2 : end - 1]), in_quotes
            elif match := re.compile(r"\$([A-Za-z_]\w*|[0-9@*])").match(raw, index):
                end = match.end()
                yield self.parameter(match[1]), in_quotes
            else:
                end = next((at for at in range(index + 1, len(raw)) if raw[at] in "\\'\"`$"), len(raw))
                yield raw[index:end], True  # a brace or a star of the word itself is not expanded
            index = end

    def value(self, name: str, index: str | None = None) -> Field | list[Field] | None:
        """Of a variable or an element; None if it is not set."""
        if name in ("@", "*"):
            return []
        if name in ("0", "BASH_SOURCE"):
            return self.file
        value: Field | list[Field] | None = self.given.get(name, self.values.get(name))
        if value is None and name in FROM_ENVIRONMENT:
            value = os.environ.get(name)
        if isinstance(value, list) and index not in ("@", "*"):
            at = int(index) if (index or "0").isdigit() and index else 0
            return value[at] if at < len(value) else None
        return value

    def parameter(self, text: str) -> Field | list[Field]:
        """The value of ${text}."""
        unreadable = Unknown(f"{self.place()}: ${{{text}}} cannot be read here")
        match = PARAMETER.fullmatch(text)
        if match is None:
            return unreadable
        name, index, rest = match[1], match[2], match[3]
        value = self.value(name, index)
        if rest and (test := re.match(r"(:?)([-=+?])", rest)):
            is_set = value is not None and not (test[1] and value == "")
            if test[2] == "+":
                return self.joined(rest[test.end() :]) if is_set else ""
            if not is_set and test[2] != "?":
                return self.joined(rest[test.end() :])
            rest = ""
        if value is None:
            if self.unset_is_empty:
                return ""
            return Unknown(f"{self.place()}: the variable {name} is not set", name)
        if not rest or isinstance(value, Unknown):
            return value
        if isinstance(value, list):
            return [] if not value else unreadable
        changed = changes(value, rest, lambda raw: str(self.joined(raw)))
        return unreadable if changed is None else changed

    def printed(self, command: str) -> Field:
        """What a command prints: only `pwd`, `basename` and `dirname` are evaluated."""
        words = [field for token in self.tokenized(command) if token.kind == "word" for field in self.fields(token)]
        if words == ["pwd"]:
            return str(self.value("PWD") or os.getcwd())
        if len(words) == 2 and words[0] in ("basename", "dirname"):
            last = words[1]
            if isinstance(last, Unknown):
                return last
            return os.path.basename(last.rstrip("/")) if words[0] == "basename" else os.path.dirname(last) or "."
        return Unknown(f"{self.place()}: $({command}) is what a command prints, and none is run here")

    def arithmetic(self, text: str) -> Field:
        """The value of $((text)): integers, names, + - * / % ** and brackets."""
        try:
            return str(self.computed(ast.parse(re.sub(r"\$\{?(\w+)\}?", r"\1", text).strip(), mode="eval").body))
        except UnknownValue as error:
            return error.value
        except (ValueError, SyntaxError, ArithmeticError):
            return Unknown(f"{self.place()}: $(({text})) cannot be computed here")

    def computed(self, node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            value = self.parameter(node.id)
            if isinstance(value, Unknown):
                raise UnknownValue(value)
            return int(str(value))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.computed(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in MATHS:
            left, right = self.computed(node.left), self.computed(node.right)
            if isinstance(node.op, ast.Pow) and right > 64:
                raise ValueError("too large")
            return MATHS[type(node.op)](left, right)
        raise ValueError("not integer arithmetic")


class UnknownValue(Exception):
    def __init__(self, value: Unknown):
        super().__init__(str(value))
        self.value = value


def changes(value: str, rest: str, expand: Callable[[str], str]) -> str | None:
    """The value of ${NAME rest}; None if bash's operator is not among those that are read here."""
    if rest in (",,", "^^"):
        return value.lower() if rest == ",," else value.upper()
    if match := re.fullmatch(r"(//?)([^/*?\[]+)/?(.*)", rest):
        return value.replace(expand(match[2]), expand(match[3]), -1 if match[1] == "//" else 1)
    if match := re.fullmatch(r"(##?|%%?)(.*)", rest):
        pattern = expand(match[2])
        from_start = match[1][0] == "#"
        parts = [(value[:cut], value[cut:]) for cut in range(len(value) + 1)]
        cuts = [cut for cut, pair in enumerate(parts) if fnmatch.fnmatchcase(pair[not from_start], pattern)]
        if not cuts:
            return value
        takes_most = len(match[1]) == 2
        cut = max(cuts) if from_start == takes_most else min(cuts)
        return value[cut:] if from_start else value[:cut]
    return None


def both(one: Truth, other: Truth) -> Truth:
    if one is False or other is False:
        return False
    return one if isinstance(one, Unknown) else other


def opposite(truth: Truth) -> Truth:
    return truth if isinstance(truth, Unknown) else not truth
