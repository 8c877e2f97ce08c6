"""Calls are found in what models write, and what is nearly a call is told so."""

from __future__ import annotations

import json
import re

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


# Two calls in each format, after reasoning that mentions a mark of calls.
WRITTEN = {
    "qwen3_coder": "so <tool_call></think>\n\n<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n"
    "<parameter=y>\n\n a</function>\n\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call><function=g></function></tool_call>",
    "glm45": "<think>so <tool_call></think>\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n<arg_key>y"
    "</arg_key><arg_value>\n a</function>\n</arg_value></tool_call>\n<tool_call>g</tool_call>",
    "minimax_m2": 'so <minimax:tool_call></think>\n\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">1'
    '</parameter>\n<parameter name="y">\n a</function>\n</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n'
    "</minimax:tool_call>",
    "kimi_k2": "so <|tool_calls_section_begin|></think><|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
    '<|tool_call_argument_begin|>{"x": 1, "y": "\\n a</function>\\n"}<|tool_call_end|><|tool_call_begin|>functions.g:1'
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "openai": "<|channel|>analysis<|message|>to=f {}<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    '<|constrain|>json<|message|>{"x": 1, "y": "\\n a</function>\\n"}<|call|><|start|>assistant to=functions.g'
    "<|channel|>commentary json<|message|>{}",
    "apertus": "<|inner_prefix|>f<|inner_suffix|><|tools_prefix|>"
    '[{"f": {"x": 1, "y": "\\n a</function>\\n"}}, {"g": {}}]',
}


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_in_the_formats_of_model_families(name: str) -> None:
    first, second = PARSERS.get(name)(WRITTEN[name])
    assert isinstance(first, ToolCall) and isinstance(second, ToolCall)
    x = "1" if first.is_text else 1
    assert (first.name, first.arguments) == ("f", {"x": x, "y": "\n a</function>\n"})
    assert (second.name, second.arguments) == ("g", {}) and first.is_text == second.is_text
    assert (first.id, second.id) == (("functions.f:0", "functions.g:1") if name == "kimi_k2" else (None, None))
    assert PARSERS.get(name)("The answer to=5 is <b>3</b> [1] {2}.") == []


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("qwen3_coder", '<tool_call>{"name": "f"}</tool_call>', "expected <function=NAME>"),
        ("qwen3_coder", "<tool_call><function=f><parameter=x>1</function></tool_call>", "found '<parameter=x>1"),
        ("qwen3_coder", "<tool_call><function=f>", "<tool_call> without </tool_call>"),
        ("glm45", "<tool_call>f<arg_key>x</arg_key>1</tool_call>", "expected NAME<arg_key>"),
        ("glm45", "<tool_call>\n</tool_call>", "expected NAME<arg_key>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="f"></minimax:tool_call>', "expected <invoke"),
        ("kimi_k2", "<|tool_calls_section_begin|>f<|tool_calls_section_end|>", "<|tool_call_begin|> without"),
        ("openai", "<|start|>assistant to=functions.f<|message|>{", "arguments are not JSON"),
        ("openai", "<|start|>assistant to=functions.f<|message|>[1]", "arguments are a list"),
        ("apertus", "<|tools_prefix|>[{", "not JSON"),
        ("apertus", '<|tools_prefix|>{"f": {}}', "expected [{NAME: {...}}]"),
    ],
)
def test_malformed_calls_of_model_families_say_why(name: str, text: str, why: str) -> None:
    (found,) = PARSERS.get(name)(text)
    assert isinstance(found, BadCall) and why in found.why and len(found.why) < 300


@pytest.mark.parametrize("name", WRITTEN)
def test_long_hostile_texts_take_linear_time(name: str) -> None:
    """Quadratic time would take hours."""
    parser, text = PARSERS.get(name), WRITTEN[name].rpartition("</think>")[2]
    for place in range(0, len(text), 40):
        parser(text[:place] + text[max(place - 40, 0) : place] * 10_000)
        parser(text[:place] + " \n" * 200_000)
        parser(text[:place] * 5_000)
    parser(text.replace("</parameter>", "").replace("</arg_value>", "") * 5_000)


MARKS = re.findall(r"<\|?[a-z_:]+\|?>|</[a-z_:]+>", " ".join(WRITTEN.values())) + ["<function=f>", '<invoke name="f">']


@given(
    st.text(st.sampled_from('<tool_cal>/{}[]":, namergust12\\'))
    | st.text()
    | st.lists(st.sampled_from(MARKS) | st.sampled_from(["f", "\n", " to=f", "{}", "[{}]", ":0"])).map("".join)
)
def test_no_text_raises(text: str) -> None:
    for parser in PARSERS.entries().values():
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
