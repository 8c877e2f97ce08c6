"""A turn is trained on all of its message, and begins as generation begins it; or the row is an error in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.loader import load_config
from hpcrl.config.schema import Config, DataConfig
from hpcrl.data.conversations import Conversations
from hpcrl.data.rendering import missing_part
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.runtime.exits import InputError

TOKENIZER = Path(__file__).parents[2] / "configs" / "tool_tokenizer"
TURN = "{{ m.role[0] }}:%s{{ eos_token }}"
CALLS = "{% for c in m.tool_calls or [] %}CALL{{ c.function | tojson }}{% endfor %}"
CUT = "{{ m.content.split('</think>') | last | trim }}"


def template(body: str, *, opens: str = "", marked: bool = False) -> str:
    """A template whose turns hold `body`, and whose generation prompt ends with `opens`."""
    own = "a:{% generation %}" + body + "{{ eos_token }}{% endgeneration %}" if marked else TURN % body
    return (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}" + own + "{% else %}"
        "{{ m.role[0] }}:{{ m.content }} {% endif %}{% endfor %}{% if add_generation_prompt %}a:"
        + opens
        + "{% endif %}"
    )


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(TOKENIZER))


def trained(tmp_path: Path, tokenizer: Any, turn: dict[str, Any], chat_template: str, **data: Any) -> str:
    """The trained text of a conversation that ends with this turn."""
    path = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": "3*4?"}, {"role": "assistant", **turn}]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    cfg = DataConfig(chat_template=chat_template, **data)
    _, response, mask = Conversations(str(path), tokenizer, cfg, "messages", "all").sequence(0)
    return str(tokenizer.decode(response[mask == 1]))


CALL = {"type": "function", "function": {"name": "mul", "arguments": {"x": 3, "y": [4.5, True], "unit": "m\n"}}}
THOUGHT = "<think>three fours</think> 12"
DROPPED = {
    "a thought that is cut": ({"content": THOUGHT}, CUT, f"content '{THOUGHT}'", "12"),
    "reasoning": (
        {"content": "12", "reasoning_content": "fours"},
        "{{ m.content }}",
        "reasoning_content 'fours'",
        "12",
    ),
    "thinking": ({"content": "12", "thinking": "fours"}, "{{ m.content }}", "thinking 'fours'", "12"),
    "calls beside text": ({"content": "I mul", "tool_calls": [CALL]}, "{{ m.content }}", "0].name 'mul'", "I mul"),
    "calls alone": ({"content": "", "tool_calls": [CALL]}, "{{ m.content }}", "tool_calls[0].name 'mul'", ""),
    "arguments": (
        {"content": "", "tool_calls": [CALL]},
        "{{ m.tool_calls[0].function.name }}",
        "tool_calls[0].arguments 'x'",
        "mul",
    ),
    "all but the first call": (
        {"content": "", "tool_calls": [CALL, {"function": {"name": "add", "arguments": '{"x": 12}'}}]},
        CALLS.replace("m.tool_calls or []", "m.tool_calls[:1]"),
        "tool_calls[1].name 'add'",
        None,
    ),
    "text beside calls": ({"content": "Let me", "tool_calls": [CALL]}, CALLS, "content 'Let me'", None),
}


@pytest.mark.parametrize("marked", [True, False], ids=["marks", "differences"])
@pytest.mark.parametrize("case", DROPPED)
def test_what_a_template_leaves_out_is_an_error(tmp_path: Path, tokenizer: Any, case: str, marked: bool) -> None:
    turn, body, part, left = DROPPED[case]
    written = template(body, marked=marked)
    with pytest.raises(InputError) as caught:
        trained(tmp_path, tokenizer, turn, written)
    line = str(caught.value)
    assert "rows.jsonl: row 0: message 1: the chat template does not render all of " in line
    assert part in line and line.endswith("or set data.accept_dropped_parts=true") and "\n" not in line
    if left is not None:
        assert trained(tmp_path, tokenizer, turn, written, accept_dropped_parts=True) == f"{left}<|eos|>"


@pytest.mark.parametrize("marked", [True, False], ids=["marks", "differences"])
def test_an_empty_turn_is_an_error(tmp_path: Path, tokenizer: Any, marked: bool) -> None:
    written = template("{{ m.content }}", marked=marked)
    with pytest.raises(InputError, match=r"row 0: message 1 is empty, so that at most its end-of-sequence token would"):
        trained(tmp_path, tokenizer, {"content": " "}, written)
    assert trained(tmp_path, tokenizer, {"content": ""}, written, accept_dropped_parts=True) == "<|eos|>"


def test_an_empty_turn_in_which_the_template_adds_a_thought_is_an_error(tmp_path: Path, tokenizer: Any) -> None:
    for content in ("", " ", "<|eos|>"):
        with pytest.raises(InputError, match=r"row 0: message 1 is empty"):
            trained(tmp_path, tokenizer, {"content": content}, template("<think></think>{{ m.content }}"))


RENDERED = {
    "stripped": ({"content": "\n 12 \n"}, "12"),
    "thoughts in lines of their own": ({"content": "<think>a b</think>12"}, "<think>\na b\n</think>\n\n12"),
    "parts": ({"content": [{"type": "text", "text": "12"}, {"type": "image"}]}, "12[image]"),
    "an empty call": ({"content": "", "tool_calls": []}, "</s>"),
    "nulls": ({"content": "12", "reasoning_content": None, "tool_calls": None}, "12"),
    "JSON": ({"tool_calls": [CALL]}, '{"name": "mul", "arguments": {"unit":"m\\n","y":[4.5,true],"x":3}}'),
    "JSON in JSON": (
        {"tool_calls": [{"function": {"name": "f", "arguments": {"x": 3, "word": "f\u00fcr \U0001f600"}}}]},
        '{"name":"f","arguments":"{\\"word\\":\\"f\\\\u00fcr \\\\ud83d\\\\ude00\\",\\"x\\":3}"}',
    ),
    "XML": ({"tool_calls": [CALL]}, "<f=mul><p=x>\n3\n</p><p=y>[4.5, true]</p><p=unit>m\n</p>"),
    "Python": ({"tool_calls": [CALL]}, "mul(x=3, y=[4.5, True], unit='m\\n')"),
    "a number as it is written": ({"tool_calls": [{"name": "f", "arguments": '{"x": 2.50}'}]}, 'f {"x": 2.50}'),
    "a number that was read": ({"tool_calls": [{"name": "f", "arguments": '{"x": 2.50}'}]}, "f(x=2.5)"),
    "escapes": (
        {"tool_calls": [{"name": "f", "arguments": {"p": 'C:\\new "\U0001f600"'}}]},
        'f {"p": "C:\\\\new \\"\\ud83d\\ude00\\""}',
    ),
    "a backspace": ({"tool_calls": [{"name": "f", "arguments": {"x": "\beta"}}]}, '{"name": "f", "x": "\\beta"}'),
    "no numbers": (
        {"tool_calls": [{"name": "f", "arguments": {"x": float("nan"), "y": -float("inf")}}]},
        '{"name": "f", "arguments": {"x": NaN, "y": -Infinity}}',
    ),
    "an old call": ({"content": "", "function_call": {"name": "f", "arguments": "{}"}}, "f()"),
    "no JSON": ({"tool_calls": [{"name": "f", "arguments": "x is 3"}]}, "f: x is 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", RENDERED)
def test_other_notations_have_all_parts(case: str) -> None:
    message, text = RENDERED[case]
    assert missing_part(message, text) is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"city": "Bonn", "days": 2}, 'f {"city": "Bonn", "days": 12}'),
        ({"city": "Bonn"}, 'f {"city": "Bonnard"}'),
        ({"a": 1}, "f add 1"),
        ({"deep": [{"a": {"b": "x"}}]}, 'f {"deep": [{"a": {}}]}'),
        ('{"a": false}', 'f {"a": true}'),
    ],
)
def test_a_value_that_differs_is_missing(arguments: Any, text: str) -> None:
    assert missing_part({"tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}, text) is not None


THINKS = "{{ '' if thinking is defined and not thinking else '<think>' }}"


def test_a_generation_prompt_that_opens_a_turn(tmp_path: Path, tokenizer: Any) -> None:
    """Each way that the error names loads the row, and the trained tokens follow those that it says."""
    for opens, first in (("<think>", "accept"), (THINKS, "data.apply_chat_template_kwargs.thinking=false")):
        written = template("{{ m.content }}", opens=opens)
        with pytest.raises(InputError) as caught:
            trained(tmp_path, tokenizer, {"content": "<b>12"}, written)
        line = str(caught.value)
        assert (
            "row 0: the generation prompt before message 1 ends with '<think>', which the chat template leaves" in line
        )
        assert "assistant_turns" not in line
        ways = [it.split(",")[0] for it in line.split("or set ")[1].split(", or ")]
        assert ways[0].startswith(first) or ways[0].startswith(f"data.{first}")
        for way in ways:
            config = tmp_path / "config.yaml"
            config.write_text("{}")
            data = load_config(str(config), [way], Config).data.model_dump(exclude_unset=True)
            assert trained(tmp_path, tokenizer, {"content": "<b>12"}, written, **data) == "<b>12<|eos|>"


def test_a_turn_whose_start_is_in_the_generation_prompt(tmp_path: Path, tokenizer: Any) -> None:
    written = template("{{ m.content }}", opens="<think>")
    assert trained(tmp_path, tokenizer, {"content": THOUGHT}, written) == "three fours</think> 12<|eos|>"


def test_messages_that_change_with_the_next_one(tmp_path: Path, tokenizer: Any) -> None:
    """As templates that list tools in the last message of the user."""
    written = (
        "{{ bos_token }}{% for m in messages %}{{ '!' if loop.last }}" + (TURN % "{{ m.content }}") + "{% endfor %}"
    )
    with pytest.raises(InputError, match=r"row 0: with message 1, the chat template renders the messages before it"):
        trained(tmp_path, tokenizer, {"content": "12"}, written, accept_generation_prompt_mismatch=True)
