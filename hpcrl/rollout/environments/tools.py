"""Tools: Python functions that the model may call, their JSON schemas, and parsers of calls in a response."""

from __future__ import annotations

import inspect
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema

from hpcrl.algorithms.parameters import Registry
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.user_code import import_file

if TYPE_CHECKING:
    from hpcrl.config.schema import Config, DataConfig

F = TypeVar("F", bound=Callable[..., Any])

MARK = "__hpcrl_tool__"
ROW_PARAMETER = "extra_info"  # filled from the data, not by the model
ARGUMENTS = re.compile(r"(Args|Arguments|Parameters):")
SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?):")
ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")


def tool(function: F) -> F:
    """Mark a function of the file `rollout.multi_turn.function_tool_path` as a tool.

    The prompt describes its name, its docstring up to `Args:`, and each parameter: type hint, default and description
    under `Args:`. A parameter `extra_info` is left out: it gets that column of the prompt's row. The function returns
    text, or another JSON value, or {"text": ..., "metrics": {name: number}}; for a vision-language model it may also
    return "image", a picture of Pillow, its bytes or its path, or a list of them. It runs in a separate process, one
    call at a time, and may raise: the model reads the error. Every rank imports the file, too, for the schemas.
    """
    setattr(function, MARK, True)
    return function


class BadArguments(ValueError):
    """Arguments that do not follow the tool's schema; the message is for the model."""


class _Untitled(GenerateJsonSchema):
    """Schemas without titles, which would only repeat names in the prompt of every sample."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@dataclass(frozen=True)
class Tool:
    """A function, and the pydantic model of its arguments, whose fields have the parameters' names as aliases."""

    name: str
    description: str
    function: Callable[..., Any]
    model: type[BaseModel]
    needs_row: bool

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """Raises TypeError for a signature that a schema cannot describe."""
        name = function.__name__
        if inspect.iscoroutinefunction(function):
            raise TypeError(f"tool {name} is a coroutine function; tools are plain functions")
        description, descriptions = described(inspect.getdoc(function) or "")
        hints = get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters
        fields: dict[str, Any] = {}
        for parameter in parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise TypeError(f"tool {name}: parameter {parameter} cannot be passed by name")
            if parameter.name == ROW_PARAMETER:
                continue
            if parameter.name not in hints:
                raise TypeError(f"tool {name}: parameter {parameter.name!r} has no type hint, which its schema needs")
            default = ... if parameter.default is parameter.empty else parameter.default
            field = Field(default, alias=parameter.name, description=descriptions.get(parameter.name))
            # Renamed, because a parameter may have the name of a method of pydantic's model.
            fields[f"parameter_{len(fields)}"] = (hints[parameter.name], field)
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        return cls(name, description, function, model, ROW_PARAMETER in parameters)

    @property
    def schema(self) -> dict[str, Any]:
        """The schema in OpenAI's function-calling format, which chat templates take."""
        parameters = self.model.model_json_schema(schema_generator=_Untitled)
        parameters = {"type": "object", "properties": {}} | {
            key: value for key, value in parameters.items() if key != "title"
        }
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def arguments(self, given: dict[str, Any], is_text: bool = False) -> dict[str, Any]:
        """Return the function's keyword arguments. Raises BadArguments if `given` does not follow the schema.

        Args:
            is_text: whether its values are texts, which become values of the parameters' types.
        """
        if is_text:
            types = {info.alias or field: info.annotation for field, info in self.model.model_fields.items()}
            given = {key: _value_of(text, types[key]) if key in types else text for key, text in given.items()}
        try:
            validated = self.model.model_validate_json(json.dumps(given), strict=True)
        except ValidationError as error:
            raise BadArguments(f"{self.name}: {'; '.join(map(_problem, error.errors(include_url=False)))}") from None
        aliases = {field: info.alias or field for field, info in self.model.model_fields.items()}
        return {aliases[field]: getattr(validated, field) for field in aliases}


def load_tools(path: str) -> dict[str, Tool]:
    """Return the tools of a file by name. Raises ImportError if it has none, and any error of the file."""
    marked = [value for value in vars(import_file(path)).values() if getattr(value, MARK, False) and callable(value)]
    if not marked:
        raise ImportError("no function in it is marked @tool (from hpcrl.rollout.environments.tools import tool)")
    return {found.name: found for found in map(Tool.of, dict.fromkeys(marked))}


def tool_schemas(path: str) -> list[dict[str, Any]]:
    """Return the schemas of the file's tools for the chat template. Raises InputError if they cannot be loaded."""
    try:
        return [found.schema for found in load_tools(path).values()]
    except Exception as error:  # the file is the user's
        raise InputError(
            f"rollout.multi_turn.function_tool_path={path}: {type(error).__name__}: {' '.join(str(error).split())}; "
            "expected a Python file with functions marked @tool"
        ) from None


def data_config(config: Config) -> DataConfig:
    """The section `data`, whose chat template lists the tools."""
    multi_turn = config.rollout.multi_turn
    if not multi_turn.enable or multi_turn.function_tool_path is None:
        return config.data
    options = {"tools": tool_schemas(multi_turn.function_tool_path)} | config.data.apply_chat_template_kwargs
    return config.data.model_copy(update={"apply_chat_template_kwargs": options})


def described(doc: str) -> tuple[str, dict[str, str]]:
    """Return (description, parameter -> its description) of a docstring in Google's style."""
    lines = doc.splitlines()
    sections = [number for number, line in enumerate(lines) if SECTION.fullmatch(line)]
    description = " ".join("\n".join(lines[: sections[0] if sections else None]).split())
    descriptions: dict[str, str] = {}
    for start, end in itertools.pairwise([*sections, len(lines)]):
        if ARGUMENTS.fullmatch(lines[start]):
            descriptions |= _arguments(lines[start + 1 : end])
    return description, descriptions


def _arguments(lines: list[str]) -> dict[str, str]:
    """Parse `name: text` or `name (type): text`; deeper indented lines continue the text."""
    descriptions: dict[str, str] = {}
    name, indent = None, None
    for line in filter(str.strip, lines):
        depth = len(line) - len(line.lstrip())
        indent = depth if indent is None else indent
        match = ARGUMENT.fullmatch(line.strip()) if depth <= indent else None
        if match:
            name = match[1]
            descriptions[name] = match[2]
        elif name is not None:
            descriptions[name] += f" {line.strip()}"
    return descriptions


def _value_of(text: str, kind: Any) -> Any:
    """The JSON value of this type that a text stands for: None, the text itself, or what it is as JSON or a bool of
    Python; the text if it is none of them."""
    adapter: TypeAdapter[Any] = TypeAdapter(kind)

    def accepts(value: Any) -> bool:
        try:
            adapter.validate_json(json.dumps(value), strict=True)
        except ValidationError:
            return False
        return True

    word = text.strip()
    if word in ("null", "None") and accepts(None):
        return None
    if accepts(text):
        return text
    try:
        return word == "True" if word in ("True", "False") else json.loads(text)
    except (ValueError, RecursionError):
        return text


def _problem(error: Any) -> str:
    place = ".".join(map(str, error["loc"]))
    return f"{place}: {error['msg']}" if place else str(error["msg"])


HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """`arguments` are by parameter, not yet validated: JSON values, or with `is_text` texts without types. id: as the
    model wrote it, if its format has one."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None
    is_text: bool = False


@dataclass(frozen=True)
class BadCall:
    """A malformed call; `why` is the error that the model reads. name: "" if unknown. id: as of ToolCall."""

    why: str
    name: str = ""
    id: str | None = None


Call: TypeAlias = ToolCall | BadCall
Parser: TypeAlias = Callable[[str], list[Call]]  # a turn's text without its end-of-sequence token -> calls in order

PARSERS: Registry[Parser] = Registry("rollout.multi_turn.format", __name__, "hpcrl.rollout.environments.call_formats")


def parsed(parser: Parser, text: str, most: int) -> list[Call]:
    """Return the first calls of a turn, at most so many; a BadCall if the parser, which may be the user's, fails."""
    try:
        calls = list(parser(text) or ())[:most]
        for call in calls:
            if not isinstance(call, Call):
                raise TypeError(f"the parser returned a {type(call).__name__}; expected a ToolCall or a BadCall")
        return calls
    except Exception as error:
        return [BadCall(f"{type(error).__name__}: {error}")]


def register_tool_parser(name: str) -> Callable[[Parser], Parser]:
    """Register a function as the parser of `rollout.multi_turn.format=<name>`; the tools' file may do so."""

    def register(parser: Parser) -> Parser:
        PARSERS.add(name, parser)
        return parser

    return register


@register_tool_parser("hermes")
def hermes(text: str) -> list[Call]:
    """Parse `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, among other text."""
    return [
        call_of_json(found[1]) if found[2] else BadCall("<tool_call> without </tool_call>")
        for found in HERMES.finditer(text)
    ]


@register_tool_parser("json")
def plain_json(text: str) -> list[Call]:
    """Parse a turn that starts with JSON: one call, several calls after each other, or a list of calls.

    `parameters` is accepted for `arguments`, which some models write. JSON that names no function is an answer.
    """
    text = text.strip()
    if not text.startswith(("{", "[")):
        return []
    decoder, place = json.JSONDecoder(), 0
    values: list[Any] = []
    while place < len(text):
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            if values or '"name"' in text:
                return [*_calls(values), BadCall(f"not JSON: {short(error)}")]
            return []
        values += value if isinstance(value, list) else [value]
        while place < len(text) and text[place] in " \t\r\n;,":
            place += 1
    return _calls(values)


def _calls(values: list[Any]) -> list[Call]:
    return [call_of(value) for value in values if isinstance(value, dict) and "name" in value]


def call_of_json(text: str) -> Call:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadCall(f"not JSON: {short(error)}")
    return call_of(value)


def call_of(value: Any) -> Call:
    """Convert a JSON value to a call; arguments may be JSON in a string, as in OpenAI's format."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return BadCall('expected {"name": ..., "arguments": {...}}')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return BadCall(f"arguments are not JSON: {short(error)}")
    if not isinstance(arguments, dict):
        return BadCall(f"arguments are a {type(arguments).__name__}; expected an object")
    return ToolCall(value["name"], arguments)


def short(error: BaseException) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:160]
