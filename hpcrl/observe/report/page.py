"""The HTML page: one file that loads nothing and runs no code but its own.

Values are JSON in a script element that no browser executes; the page's script writes them into the document as text
only. A Content-Security-Policy allows the inlined scripts and styles by their hashes, and no connection at all.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hpcrl.sandbox.foreign_files import ERRORS, printable

ASSETS = Path(__file__).parent / "assets"
STYLES = ("uPlot.min.css", "page.css")
SCRIPTS = ("uPlot.iife.min.js", "dom.js", "charts.js", "runs.js", "samples.js", "main.js")
LICENCE = "uPlot.LICENSE"
_TO_ESCAPE = re.compile("[<>&\x7f]|[^\x00-\x7f]")  # all but ASCII is looked up


def render(data: Mapping[str, Any], title: str) -> bytes:
    """The page as UTF-8."""
    licence = f"/* uPlot:\n{(ASSETS / LICENCE).read_text(encoding='utf-8')}*/"
    style, script = licence + _joined(STYLES), licence + _joined(SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "POLICY": html.escape(policy),
        "TITLE": html.escape(printable(title, one_line=True)),
        "STYLE": style,
        "DATA": json_in_html(data),
        "SCRIPT": script,
    }
    pieces = re.split(r"\{\{(\w+)\}\}", (ASSETS / "page.html").read_text(encoding="utf-8"))
    pieces[1::2] = [parts[name] for name in pieces[1::2]]
    return "".join(pieces).encode("utf-8", errors=ERRORS)


def json_in_html(data: Any) -> str:
    """JSON without the characters that could end a script element, and those that `printable` shows by other ones."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _TO_ESCAPE.sub(lambda found: _escaped(found[0]), text)


@cache
def _escaped(character: str) -> str:
    if character not in "<>&\x7f" and printable(character) == character:
        return character
    return json.dumps(character)[1:-1] if not character.isascii() else f"\\u{ord(character):04x}"


def _joined(names: tuple[str, ...]) -> str:
    return "\n" + "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in names) + "\n"


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
