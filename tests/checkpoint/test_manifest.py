from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.checkpoint.manifest import MANIFEST, verify, write_manifest

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


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


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


@pytest.mark.parametrize("content", ["[]", "{}", "3", '{"files": 3, "xxh3_128": ""}', '{"files": [{}]}', "\x00"])
def test_garbage_is_a_damaged_manifest(folder, content):
    (folder / MANIFEST).write_text(content)
    assert verify(folder)[0].startswith(f"{MANIFEST} is damaged")
