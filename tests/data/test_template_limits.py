"""Chat templates of others that never end or fill the memory end in one line; others render as without limits."""

from __future__ import annotations

import mmap
import resource
import threading
import time
from typing import Any

import pytest

from hpcrl.data import chat
from hpcrl.data.chat import ChatTemplate, TemplateLimit, within_limits
from hpcrl.runtime.exits import InputError

LOOP = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
MACRO = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(70) }}"
DOUBLED = (
    "{% set ns = namespace(s='ab') %}{% for a in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s[:1] }}"
)
LATER = "{{ messages[0].content }}{% if messages|length > 1 %}" + LOOP + "{% endif %}"


@pytest.fixture(autouse=True)
def few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "TEMPLATE_SECONDS", 0.1)
    monkeypatch.setattr(chat, "_POLL", 0.02)
    monkeypatch.setattr(chat, "TEMPLATE_MEMORY", 1 << 28)
    monkeypatch.setattr(chat, "_measured", float("-inf"))


def render(tokenizer: Any, template: str, num: int = 2) -> str:
    messages = [{"role": "user", "content": "5 8 5 2 6:"}] * num
    return ChatTemplate(tokenizer, template, {}, "data.chat_template").text(
        messages, "x: row 7", generation_prompt=True
    )


@pytest.mark.parametrize("template", [LATER, MACRO, DOUBLED, "{{ lipsum(n=1000000000) }}"])
def test_a_template_that_takes_too_long(tokenizer: Any, template: str) -> None:
    with pytest.raises(InputError, match=r"^x: row 7: the chat template failed: .*it needs more than") as error:
        render(tokenizer, template)
    assert "\n" not in str(error.value)
    assert resource.getrlimit(resource.RLIMIT_DATA) == chat._usual and not chat._renderings


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 10000000000 }}",  # computed when the template is compiled
        "{{ messages[0].content * 10000000000 }}",
        "{{ '{:>99999999999}'.format(1) }}",
        "{{ 'x'.replace('x', 'y' * 100000) * 100000 }}",
        "{{ (range(99999)|list) * 1000000 }}",
    ],
)
def test_a_template_that_takes_too_much_memory(tokenizer: Any, template: str) -> None:
    with pytest.raises(InputError, match="it needs more than|its text has"):
        render(tokenizer, template)
    mmap.mmap(-1, 1 << 29).close()  # the limit is gone


@pytest.mark.parametrize("template", ["{{ 9**9**9 }}", "{% set n = messages|length %}{{ (n*9) ** (9*10**9) }}"])
def test_a_power_is_not_computed(tokenizer: Any, template: str) -> None:
    """Python could not interrupt it. In text, two asterisks are no power."""
    with pytest.raises(InputError, match=r"it computes a power \(\*\*\)"):
        render(tokenizer, template)
    assert render(tokenizer, "**{{ '2**3' }}**{# 2**3 #}") == "**2**3**"


def test_a_long_text(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MOST_CHARACTERS", 1000)
    with pytest.raises(InputError, match="its text has 1001 characters; expected at most 1000"):
        render(tokenizer, "{{ 'x' * 1001 }}")


def test_the_text_is_the_one_without_limits(tokenizer: Any) -> None:
    assert render(tokenizer, LATER, num=1) == "5 8 5 2 6:"
    with pytest.raises(InputError, match="TemplateError: no"):
        render(tokenizer, "{{ raise_exception('no') }}")


def test_who_is_interrupted_has_time_to_leave() -> None:
    """A second interrupt while the first one ends a deep template would end the caller."""
    interrupts = 0

    def spin() -> None:
        nonlocal interrupts
        until = time.thread_time() + 0.55
        while time.thread_time() < until:
            try:
                while time.thread_time() < until:
                    pass
            except TemplateLimit:
                interrupts += 1

    within_limits(None, spin)
    assert 1 <= interrupts <= 5


def test_a_thread_that_waits_is_not_interrupted() -> None:
    """The time is that of the CPU, so a job may be suspended; and the other thread keeps its own."""
    found, ended = list[str](), threading.Event()

    def wait() -> None:
        found.append(within_limits(None, lambda: str(ended.wait(60))))

    thread = threading.Thread(target=wait)
    thread.start()
    with pytest.raises(TemplateLimit, match="0.1 s"):
        within_limits(None, lambda: sum(1 for _ in iter(int, 1)))
    assert chat._renderings  # of the other thread
    ended.set()
    thread.join()
    assert found == ["True"] and resource.getrlimit(resource.RLIMIT_DATA) == chat._usual
