"""Files that the user names, in folders where another user has put links."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.run.inference import GenerationFile
from hpcrl.sandbox.new_files import create_in_place, draft_of, open_to_append, replace_json
from tests.other_user import as_other_user, needs_other_user, shared  # noqa: F401  # fixture


def test_a_draft_replaces_the_file_or_the_link_and_goes_after_an_error(tmp_path: Path) -> None:
    kept, out = tmp_path / "kept", tmp_path / "out.png"
    kept.write_text("kept")
    out.symlink_to(kept)
    with draft_of(out, mode=0o600) as draft:
        assert draft.parent == tmp_path and draft.suffix == ".png" and out.is_symlink()
        draft.write_text("new")
    assert (out.read_text(), kept.read_text(), stat.S_IMODE(out.stat().st_mode)) == ("new", "kept", 0o600)
    with pytest.raises(ZeroDivisionError), draft_of(out) as draft:
        draft.write_text(str(1 // 0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "out.png"] and out.read_text() == "new"


def test_a_device_is_written_to(tmp_path: Path) -> None:
    program = "from hpcrl.sandbox.new_files import *; replace_json(Path('/dev/stdout'), {'a': 1})"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed == '{\n "a": 1\n}\n' and Path("/dev/stdout").is_symlink()


@needs_other_user
def test_links_of_another_user_are_not_written_through(shared: Path, tmp_path: Path) -> None:  # noqa: F811
    """Not in a folder of a group either, where the kernel's protection of links does not hold."""
    shared.chmod(0o777)
    victim, own = tmp_path / "keys", tmp_path / "own.jsonl"
    victim.write_text("secret")
    names = ("new.tmp", "values.json", "values.json.tmp", "lines.jsonl", "lines.jsonl.settings.json.tmp")
    as_other_user(lambda: [(shared / name).symlink_to(victim) for name in names])
    with create_in_place(shared / "new.tmp") as file:
        file.write("new")
    replace_json(shared / "values.json", {"b": 2})
    with pytest.raises(OSError, match="Too many levels"):
        open_to_append(shared / "lines.jsonl")
    as_other_user(lambda: (shared / "lines.jsonl.settings.json").write_text('{"n": 1}'))
    with pytest.raises(Exception, match="cannot write"):
        GenerationFile(shared / "lines.jsonl", {"n": 1}, iter(()), 1)
    assert victim.read_text() == "secret"
    assert (shared / "new.tmp").read_text() == "new" and not (shared / "values.json").is_symlink()

    (tmp_path / "link").symlink_to(own)
    with open_to_append(tmp_path / "link") as file:
        file.write(b"mine")
    assert own.read_text() == "mine"
