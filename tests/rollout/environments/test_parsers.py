"""Calls are found in what models write, and what is nearly a call is told so."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.algorithms.parameters import UnknownName
from hpcrl.rollout.environments.tools import PARSERS, BadCall, ToolCall, hermes, plain_json, register_tool_parser

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
CALLS = st.lists(st.builds(ToolCall, st.text(), st.dictionaries(st.text(), VALUES)), max_size=3)


def written(call: ToolCall) -> str:
    return json.dumps({"name": call.name, "arguments": call.arguments}).replace("</", "<\\/")


@given(CALLS, st.sampled_from(["", "let me see\n", "{not json} "]))
def test_hermes_finds_every_call_among_other_text(calls: list[ToolCall], text: str) -> None:
    assert hermes(text + text.join(f"<tool_call>\n{written(call)}\n</tool_call>" for call in calls)) == calls


@given(CALLS, st.booleans())
def test_json_finds_calls_in_a_list_or_one_after_the_other(calls: list[ToolCall], listed: bool) -> None:
    text = f"[{', '.join(map(written, calls))}]" if listed else "\n".join(map(written, calls))
    assert plain_json(f" {text}\n") == calls


@given(st.text(st.sampled_from('<tool_cal>/{}[]":, namergust12\\')) | st.text())
def test_no_text_raises(text: str) -> None:
    for parser in (hermes, plain_json):
        assert all(isinstance(call, ToolCall | BadCall) for call in parser(text))


@pytest.mark.parametrize(
    "inside",
    [
        "",
        "{",
        "[]",
        '{"name": 3}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "{"}',
        '{"name": "f", "arguments": ' + "[" * 100_000,
        '{"name": "f", "arguments": {"x": ' + "1" * 5000 + "}}",
    ],
)
def test_malformed_calls_say_why(inside: str) -> None:
    for found in (hermes(f"<tool_call>{inside}</tool_call>"), hermes(f"<tool_call>{inside}")):
        assert len(found) == 1 and isinstance(found[0], BadCall) and 0 < len(found[0].why) < 300


def test_many_open_calls_are_one_error() -> None:
    assert len(hermes("<tool_call>" * 100_000)) == 1


def test_plain_json_takes_answers_for_answers() -> None:
    assert (
        plain_json("the answer is 3") == plain_json('{"answer": 3}') == plain_json("{1, 2}") == plain_json("[1]") == []
    )
    (bad,) = plain_json('{"name": "f", "arguments": {"x": }}')
    assert isinstance(bad, BadCall) and "not JSON" in bad.why
    assert plain_json('{"name": "f", "parameters": {"x": 1}}') == [ToolCall("f", {"x": 1})]
    assert hermes('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>') == [ToolCall("f", {"x": 1})]


def test_parsers_have_names() -> None:
    assert PARSERS.get("hermes") is hermes and PARSERS.get("json") is plain_json
    with pytest.raises(ValueError, match="already"):
        register_tool_parser("json")(hermes)
    with pytest.raises(UnknownName, match="did you mean 'hermes'"):
        PARSERS.get("herms")
