"""Text of models and of other people's files, made safe for a terminal."""

from __future__ import annotations

import re
import unicodedata

_HARMLESS = {"\n", "\t", "\u200c", "\u200d"}  # joiners are parts of emoji and of words
_SUSPECT = re.compile(r"[^\x20-\x7e\n]")  # all of it is looked up; most text has little


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
