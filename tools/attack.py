"""Attacks on an installation of hpcrl: hostile models, runs, data and configs, programs under test, another user.

    .venv/bin/python tools/attack.py            a minute
    .venv/bin/python tools/attack.py --all      all of them
    .venv/bin/python tools/attack.py --list
    .venv/bin/python tools/attack.py "run folder" tokenizer      those with such words in kind or name

Each is made in a temporary folder, through the command that a user would start. A line says what came of it: held,
REACHED with what was read, written, run or broken, or that it is not possible here and why. The exit code is 1 if one
reached something. As root, attacks of a second user run as --user.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import attack_files  # noqa: F401  # these add to ATTACKS
import attack_processes  # noqa: F401
import attack_runs  # noqa: F401
from attack_place import ATTACKS, Attack, NotPossible, Place, Reached

from hpcrl.sandbox.foreign_files import printable

HELD, REACHED, IMPOSSIBLE = "held", "REACHED", "not possible here"


def result_of(attack: Attack, user: str) -> tuple[str, str]:
    """(result, reason)"""
    place = Place(Path(tempfile.mkdtemp(prefix="hpcrl_attack_")), user)
    try:
        attack.make(place)
    except NotPossible as reason:
        return IMPOSSIBLE, str(reason)
    except Reached as what:
        return REACHED, f"{what} ({place.last})"
    finally:
        place.remove()
    return HELD, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="slow ones, too")
    parser.add_argument("--list", action="store_true", help="print them and make none")
    parser.add_argument("--user", default="nobody", metavar="NAME", help="the second user, where this one is root")
    parser.add_argument("names", nargs="*", metavar="WORDS", help="attacks whose kind or name has these words")
    options = parser.parse_args()
    chosen = [each for each in ATTACKS if any(word in f"{each.kind}: {each.name}" for word in options.names or [""])]
    if not options.names and not options.all:
        chosen = [each for each in chosen if each.is_fast or options.list]
    if not chosen:
        parser.error(f"found no attack with {' or '.join(options.names)}; --list prints them")
    widths = [max(len(each[column]) for each in chosen) for column in range(3)]
    counts = dict.fromkeys((HELD, REACHED, IMPOSSIBLE), 0)
    for each in chosen:
        row = "  ".join(text.ljust(width) for text, width in zip(each[:3], widths, strict=True))
        if options.list:
            print(f"{row}  {'' if each.is_fast else '--all'}".rstrip())
            continue
        began = time.monotonic()
        result, reason = result_of(each, options.user)
        counts[result] += 1
        shown = f": {printable(reason, one_line=True)}" if reason else ""
        print(f"{row}  {time.monotonic() - began:6.1f} s  {result}{shown}", flush=True)
    if not options.list:
        print(", ".join(f"{count} {result}" for result, count in counts.items()))
    return 1 if counts[REACHED] else 0


if __name__ == "__main__":
    sys.exit(main())
