"""Text of models, of users and of their files, made safe for files and terminals.

It may hold surrogates without the other half, which no encoding has: JSON can write them, and the name of a file whose
bytes are not UTF-8 has them.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from io import TextIOWrapper

ERRORS = "backslashreplace"  # how streams of text write what their encoding lacks, as Python's stderr does
_HARMLESS = {"\n", "\t", "\u200c", "\u200d"}  # joiners are parts of emoji and of words
_SUSPECT = re.compile(r"[^\x20-\x7e\n]")  # all of it is looked up; most text has little


def writable(text: str) -> str:
    r"""`text` as UTF-8 can hold it: an unpaired surrogate becomes its escape, `\ud83d`.

    Of JSON text, this is the escape that JSON has for it, so the value is read back as it was.
    """
    return text if text.isascii() else text.encode("utf-8", ERRORS).decode("utf-8")


def take_any_text() -> None:
    """Let stdout take text that its encoding lacks: surrogates, and on an ASCII terminal all but ASCII."""
    if isinstance(sys.stdout, TextIOWrapper):  # tests replace it
        sys.stdout.reconfigure(errors=ERRORS)


def printable(text: str, *, one_line: bool = False) -> str:
    """`text` without characters that a terminal acts on: controls, escapes, and marks that change the direction.

    Control characters become their pictures (ESC: U+241B), others `<U+202E>`; line breaks and tabs stay, unless
    `one_line` is true: then a line break becomes U+23CE.
    """
    text = _SUSPECT.sub(_shown, text)
    return text.replace("\n", "\u23ce").replace("\t", " ") if one_line else text


def _shown(match: re.Match[str]) -> str:
    character = match[0]
    code = ord(character)
    if character in _HARMLESS or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"<U+{code:04X}>"
