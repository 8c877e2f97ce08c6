"""Files of other tools, as columns of this program's: their format is recognised by the columns of a file.

A format adds columns to those of a file; the file's own stay. Files in verl's schema (`prompt`), with conversations
(`messages`), or with prompts, answers and labels under this program's names are read as they are.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from hpcrl.runtime.exits import InputError

Row = Mapping[str, Any]
Message = dict[str, Any]

ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant"}
SAME = ("user", "assistant", "system", "tool")  # names of roles that ShareGPT's files have, too


class BadRow(Exception):
    """What is wrong in a row, and what was expected."""


class Format(NamedTuple):
    """needs: columns that a file of the format has, `lacks`: that it has not. adds: columns that `convert` returns."""

    needs: tuple[str, ...]
    lacks: tuple[str, ...]
    adds: tuple[str, ...]
    convert: Callable[[Row], dict[str, Any]]


def alpaca(row: Row) -> dict[str, Any]:
    output = text(row, "output")
    if not output.strip():
        raise BadRow("'output' is empty; expected the answer; remove the row")
    return alpaca_preference(row) | {"answer": output}


def alpaca_preference(row: Row) -> dict[str, Any]:
    """The instruction with its input as the user's message, after the rounds of `history`."""
    instruction, context = (text(row, name) for name in ("instruction", "input"))
    if not instruction.strip():
        raise BadRow("'instruction' is empty; expected the text of a task; remove the row")
    prompt = [message("system", system)] if (system := text(row, "system")) else []
    for turn in row.get("history") or []:
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(it, str) for it in turn):
            raise BadRow(f"'history' holds {str(turn)[:80]!r}; expected pairs of an instruction and an answer")
        prompt += [message("user", turn[0]), message("assistant", turn[1])]
    prompt.append(message("user", f"{instruction}\n{context}" if context.strip() else instruction))
    return {"prompt": prompt}


def sharegpt(row: Row) -> dict[str, Any]:
    """The turns as messages; a prompt is what precedes the last turn of the assistant, if that is the last of all."""
    messages = turns(row.get("conversations"), "conversations")
    if (system := text(row, "system")) and messages[0]["role"] != "system":
        messages.insert(0, message("system", system))
    return {"messages": messages, "prompt": messages[:-1] if messages[-1]["role"] == "assistant" else messages}


def sharegpt_preference(row: Row) -> dict[str, Any]:
    """The turns as the prompt, and the two answers as text."""
    sides = {name: turns([row.get(name)], name)[0]["content"] for name in ("chosen", "rejected")}
    return {"prompt": sharegpt(row)["messages"]} | sides


def prompt_completion(row: Row) -> dict[str, Any]:
    return {"answer": row.get("completion")}


def implicit_preference(row: Row) -> dict[str, Any]:
    """The prompt is what both conversations begin with."""
    chosen, rejected = (row.get(name) for name in ("chosen", "rejected"))
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        if not isinstance(side, list):
            raise BadRow(
                f"there is no column 'prompt', and {name!r} holds {str(side)[:80]!r}; expected lists of messages that "
                "begin with the prompt; add the column"
            )
    assert isinstance(chosen, list) and isinstance(rejected, list)
    pairs = zip(chosen, rejected, strict=False)
    num_shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    num_prompt = min(num_shared, len(chosen) - 1, len(rejected) - 1)
    if num_prompt < 1:
        raise BadRow("'chosen' and 'rejected' begin with different messages; expected the same prompt in both")
    return {"prompt": chosen[:num_prompt], "chosen": chosen[num_prompt:], "rejected": rejected[num_prompt:]}


FORMATS = {
    "alpaca": Format(("instruction", "output"), ("prompt", "messages"), ("prompt", "answer"), alpaca),
    "alpaca_preference": Format(
        ("instruction", "chosen", "rejected"), ("prompt", "messages", "conversations"), ("prompt",), alpaca_preference
    ),
    "sharegpt_preference": Format(
        ("conversations", "chosen", "rejected"),
        ("prompt", "messages"),
        ("prompt", "chosen", "rejected"),
        sharegpt_preference,
    ),
    "sharegpt": Format(("conversations",), ("prompt", "chosen", "rejected"), ("messages", "prompt"), sharegpt),
    "prompt_completion": Format(
        ("prompt", "completion"), ("answer", "messages", "label"), ("answer",), prompt_completion
    ),
    "implicit_preference": Format(
        ("chosen", "rejected"),
        ("prompt", "messages", "conversations", "instruction"),
        ("prompt", "chosen", "rejected"),
        implicit_preference,
    ),
}
READY = "ready"  # nothing is added


def recognised(path: str, columns: Collection[str], name: str = "auto") -> str:
    """The format of a file with these columns: READY, or a name in FORMATS.

    Raises InputError if several formats fit, or if the columns of the one that is named are missing.

    Args:
        name: the value of data.format.
    """
    if name in FORMATS:
        if missing := [column for column in FORMATS[name].needs if column not in columns]:
            raise InputError(
                f"{path}: data.format={name} needs the columns {', '.join(FORMATS[name].needs)}, and "
                f"{', '.join(missing)} is missing; it has {', '.join(sorted(columns)) or 'none'}"
            )
        return name
    if name == READY:
        return READY
    fitting = [
        key for key, one in FORMATS.items() if set(one.needs) <= set(columns) and not set(one.lacks) & set(columns)
    ]
    if "sharegpt" in fitting and "messages" in columns:
        fitting.append(READY)
    if len(fitting) > 1:
        raise InputError(
            f"{path}: its columns {', '.join(sorted(columns))} fit the formats {' and '.join(fitting)}; rows of a "
            f"file have one format; split the file, or set data.format to one of {', '.join(fitting)}"
        )
    return fitting[0] if fitting else READY


def converted(path: str, number: int, row: Row, name: str) -> dict[str, Any]:
    """The columns that a format adds to a row. Raises InputError with the file and the number of the row."""
    try:
        return FORMATS[name].convert(row)
    except BadRow as error:
        raise InputError(f"{path}: row {number}: {error}") from None


def turns(value: Any, name: str) -> list[Message]:
    """ShareGPT's turns {from, value} as messages; those that are messages already stay."""
    if not isinstance(value, list) or not value:
        raise BadRow(f"{name!r} holds {str(value)[:80]!r}; expected turns {{from, value}}; remove the row")
    return [turn_message(turn, name) for turn in value]


def turn_message(turn: Any, name: str) -> Message:
    if not isinstance(turn, dict) or not ("role" in turn or isinstance(turn.get("value"), str)):
        raise BadRow(f"{name!r} has the turn {str(turn)[:80]!r}; expected {{from, value}}, with text in both")
    if "role" in turn:
        return turn
    role = str(turn.get("from"))
    if role not in ROLES and role not in SAME:
        raise BadRow(f"{name!r} has a turn from {role[:40]!r}; expected one of {', '.join([*ROLES, *SAME])}")
    if role == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": calls_of(turn["value"], name)}
    return message(ROLES.get(role, role), turn["value"])


def calls_of(value: str, name: str) -> list[dict[str, Any]]:
    """The tool calls {name, arguments} in the JSON of a turn from function_call."""
    try:
        calls = json.loads(value)
    except (ValueError, RecursionError):
        calls = None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise BadRow(f"{name!r} has the function_call {value[:80]!r}; expected JSON {{name, arguments}}")
    return [{"type": "function", "function": call} for call in calls]


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def text(row: Row, name: str) -> str:
    """A column of text, "" if the row lacks it."""
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRow(f"{name!r} holds {str(value)[:80]!r}; expected text")
    return value or ""
