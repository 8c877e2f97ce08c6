"""What `tools/attack.py` says of this installation, of one with a hole, and where an attack cannot be made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "attack.py"


def run(*arguments: str, hole: str = "") -> subprocess.CompletedProcess[str]:
    """hole: Python that each command runs before it starts."""
    source = f"import runpy, sys; sys.argv = {[str(TOOL), *arguments]!r}; sys.path.insert(0, {str(TOOL.parent)!r})\n"
    source += f"{hole}\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=280)


def test_the_fast_attacks_reach_nothing() -> None:
    done = run()
    *lines, counts = done.stdout.splitlines()
    assert done.returncode == 0 and ", 0 REACHED, " in counts, done.stdout + done.stderr
    impossible = [line for line in lines if "not possible here" in line]
    assert len(lines) >= 15 and (os.geteuid() != 0 or not impossible), done.stdout


def test_a_hole_is_named() -> None:
    """Also one in what the attacks share: a command that prints a private file."""
    hole = (
        "import attack_place\n"
        "leak = 'print(open({!r}).read())'\n"
        "attack_place.Place.hpcrl = lambda place, *_, **more: place.python('-c', leak.format(str(place.key)))"
    )
    done = run("config.json: depth", hole=hole)
    assert done.returncode == 1 and "REACHED: private text was printed" in done.stdout, done.stdout + done.stderr
    assert "0 held, 1 REACHED" in done.stdout


def test_names_select() -> None:
    listed = run("--list").stdout.splitlines()
    assert len(listed) > 20 and sum(line.endswith("--all") for line in listed) >= 8
    done = run("no such attack")
    assert done.returncode == 2 and "found no attack with no such attack; --list prints them" in done.stderr
