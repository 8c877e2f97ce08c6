from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpcrl.engine.checkpoint.manifest import MANIFEST, verify, write_manifest
from tests.engine.checkpoint.damage import flipped, truncated

FILES = {"trainer.json": b"{}", "actor/__0_0.distcp": bytes(range(256)) * 50, "actor/empty": b"", "critic/x": b"abc"}


@pytest.fixture
def folder(tmp_path) -> Path:
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    write_manifest(tmp_path)
    return tmp_path


def test_a_whole_folder_has_no_problems(folder):
    assert verify(folder) == []
    entries = {entry["path"]: entry for entry in json.loads((folder / MANIFEST).read_text())["files"]}
    assert set(entries) == set(FILES)
    assert entries["critic/x"] == {"path": "critic/x", "bytes": 3, "xxh3_128": "06b05ab6733a618578af5f94892f3950"}


def test_an_extra_file_is_fine(folder):
    (folder / "actor" / "notes.txt").write_text("mine")
    assert verify(folder) == []


DAMAGES = {"truncated": truncated, "flipped": flipped, "removed": Path.unlink, "emptied": lambda p: p.write_bytes(b"")}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [MANIFEST, "trainer.json", "actor/__0_0.distcp", "critic/x"])
def test_damage_to_any_file_is_named(folder, name, damage):
    DAMAGES[damage](folder / name)
    problems = verify(folder)
    assert len(problems) == 1 and problems[0].startswith(f"{name} ")


def test_a_flip_of_any_bit_of_the_manifest_is_noticed_or_harmless(folder):
    manifest = folder / MANIFEST
    whole = manifest.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            data = bytearray(whole)
            data[place] ^= 1 << bit
            manifest.write_bytes(data)
            try:
                harmless = json.loads(data) == json.loads(whole)
            except ValueError:
                harmless = False
            assert verify(folder) == [] if harmless else verify(folder)[0].startswith(MANIFEST)


def test_a_manifest_cannot_point_outside(folder):
    inner = folder / "actor"
    write_manifest(inner)
    content = (inner / MANIFEST).read_text().replace("__0_0.distcp", "../critic/x")
    (inner / MANIFEST).write_text(content)
    assert verify(inner)[0].startswith(MANIFEST)


GARBAGE = ["[]", "{}", "3", '{"files": 3, "xxh3_128": ""}', '{"files": [{}]}', "\x00", "[" * 10**5]


@pytest.mark.parametrize("content", GARBAGE)
def test_garbage_is_a_damaged_manifest(folder, content):
    (folder / MANIFEST).write_text(content)
    assert verify(folder)[0].startswith(f"{MANIFEST} is damaged")


def link(path: Path) -> None:
    path.rename(path.with_name("aside"))
    path.symlink_to(path.with_name("aside"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("replace", [link, pipe])
@pytest.mark.parametrize("name", [MANIFEST, "trainer.json", "critic/x"])
def test_a_link_or_a_pipe_is_no_file_of_a_checkpoint(folder, name, replace):
    """With the content that the manifest asks for, too: it could be a file that only this user may read."""
    replace(folder / name)
    assert verify(folder)[0].startswith(f"{name} is ")


def test_a_folder_of_a_checkpoint_is_no_link(folder, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (folder / "critic").rename(outside / "critic")
    (folder / "critic").symlink_to(outside / "critic")
    assert verify(folder) == ["critic/x is or lies behind a link, which checkpoints do not contain"]


def test_a_checkpoint_may_lie_behind_a_link(folder, tmp_path_factory):
    link = tmp_path_factory.mktemp("links") / "run"
    link.symlink_to(folder)
    assert verify(link) == []
