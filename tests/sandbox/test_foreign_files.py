"""Links, pipes, devices and expanding texts in folders of others: one line, and nothing else is read."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcrl.sandbox import foreign_files
from hpcrl.sandbox.foreign_files import (
    ForeignFileError,
    check_folder,
    check_yaml,
    left_out,
    named,
    open_file,
    parse_json,
    read_bytes,
    read_json,
    read_text,
)

SECRET = "key-of-the-user"


@pytest.fixture
def private(tmp_path: Path) -> Path:
    place = tmp_path / "home" / ".ssh"
    place.mkdir(parents=True)
    (place / "id").write_text(SECRET)
    return place


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "others" / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "rank_00000.log").write_text("log")
    return folder


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda path, private: path.symlink_to(private / "id"), "a link that leads out of"),
        (lambda path, private: path.symlink_to("../../../home/.ssh/id"), "a link that leads out of"),
        (lambda path, private: path.symlink_to("/dev/zero"), "a link that leads out of"),
        (lambda path, private: os.mkfifo(path), "a pipe"),
        (lambda path, private: _socket(path), "a socket"),
        (lambda path, private: path.mkdir(), "a directory"),
    ],
)
def test_what_is_no_file_of_the_folder_is_one_line(
    make: Callable[[Path, Path], None], found: str, run: Path, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)  # sockets have short names
    path = run / "logs" / "rank_00001.log"
    make(path.relative_to(run), private)
    with pytest.raises(ForeignFileError) as error:
        read_text(path, run)
    assert str(error.value).startswith(f"{path}: {found}") and "expected" in str(error.value)
    assert "\n" not in str(error.value) and SECRET not in str(error.value)


def test_a_folder_that_is_a_link_and_a_path_that_leaves(run: Path, private: Path) -> None:
    (run / "rollouts").symlink_to(private)
    with pytest.raises(ForeignFileError, match="leads out of"):
        open_file(run / "rollouts" / "id", run)
    with pytest.raises(ForeignFileError):
        open_file(run / "logs" / ".." / ".." / ".." / "home" / ".ssh" / "id", run)
    with pytest.raises(FileNotFoundError):
        open_file(run / "rollouts_" / "id", run)


def test_links_that_stay_inside_and_a_root_that_is_a_link(run: Path, tmp_path: Path) -> None:
    (run / "newest.log").symlink_to("logs/rank_00000.log")
    (run / "old").symlink_to("logs")
    own = tmp_path / "mine"
    own.symlink_to(run)
    for path in (own / "newest.log", own / "old" / "rank_00000.log", own / "logs" / "rank_00000.log"):
        assert read_text(path, own) == "log"
    with pytest.raises(ForeignFileError, match="a link; expected a regular file"):
        read_bytes(own / "newest.log", own, links=False)
    with named(own / "newest.log", own) as name:
        assert Path(name).read_text() == "log"


def test_a_link_that_is_exchanged_while_it_is_resolved(
    run: Path, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that was checked is the one that is opened."""
    path = run / "newest.log"
    path.symlink_to("logs/rank_00000.log")
    resolve = os.path.realpath

    def racing(found: Any) -> str:
        resolved = resolve(found)
        if Path(found) == path:
            (run / "logs" / "rank_00000.log").unlink()
            (run / "logs" / "rank_00000.log").symlink_to(private / "id")
        return resolved

    monkeypatch.setattr(os.path, "realpath", racing)
    with pytest.raises(OSError):
        read_text(path, run)


def hub_folder(root: Path, files: dict[str, str]) -> Path:
    """A model in the layout of the Hugging Face cache."""
    folder = root / "models--a--b" / "snapshots" / "0123abc"
    for number, (name, text) in enumerate(files.items()):
        blob = root / "models--a--b" / "blobs" / f"{number:040x}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_text(text)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(os.path.relpath(blob, (folder / name).parent))
    return folder


def test_a_folder_of_the_hub_cache(tmp_path: Path, private: Path) -> None:
    folder = hub_folder(tmp_path, {"config.json": "{}", "additional_chat_templates/tool.jinja": "{{ 1 }}"})
    assert read_json(folder / "config.json", folder) == {}
    check_folder(folder)
    (folder / "tokenizer.json").symlink_to(private / "id")
    with pytest.raises(ForeignFileError, match=r"tokenizer.json: a link that leads out of .*cp -L"):
        check_folder(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").symlink_to("../../refs")
    (folder.parents[1] / "refs").write_text("main")
    with pytest.raises(ForeignFileError, match="vocab.txt"):
        check_folder(folder)


def test_large_files_of_a_bundle_are_links(tmp_path: Path, private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_files, "BUNDLED", 100)
    weights = tmp_path / "weights"
    weights.write_bytes(bytes(101))
    for place, is_read in (("bundle_0a1b2c3d/inputs/model", True), ("others/inputs/model", False)):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        (folder / "model.safetensors").symlink_to(weights)
        (folder / "config.json").symlink_to(private / "id")  # no bundle has links to small files
        for name, is_allowed in (("model.safetensors", is_read), ("config.json", False)):
            if is_allowed:
                assert len(read_bytes(folder / name, folder)) == 101
            else:
                with pytest.raises(ForeignFileError):
                    open_file(folder / name, folder)


def test_sizes_and_growth(run: Path) -> None:
    path = run / "metrics.jsonl"
    path.write_bytes(b"x" * 10)
    with pytest.raises(ForeignFileError, match="10 bytes; expected at most 9"):
        read_bytes(path, most=9)
    with open(path, "ab") as writer, open_file(path, most=10) as file:
        writer.write(b"y" * 10)
        writer.flush()
        assert file.read() == b"x" * 10 + b"y" * 10  # a run that writes may be read on
    os.truncate(path, 1 << 40)
    with pytest.raises(ForeignFileError):
        read_bytes(path)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 150 + "1" + "}" * 150, "[" * 150 + "]" * 150])
def test_deep_json_is_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(text)


def test_json_that_is_not_deep() -> None:
    assert parse_json('[{"a": [[1, "[[[["]]}, 2]') == [{"a": [[1, "[[[["]]}, 2]
    assert parse_json(b"7") == 7


BOMBS = {
    "sequences": "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9) if n else 1}]\n" for n in range(12)),
    "mappings": "".join(
        f"l{n}: &l{n} {{{', '.join(f'k{i}: *l{n - 1}' for i in range(9)) if n else 'a: 1'}}}\n" for n in range(12)
    ),
    "merges": "l0: &l0 {a: 1}\n"
    + "".join(f"l{n}: &l{n} {{<<: [{', '.join([f'*l{n - 1}'] * 9)}]}}\n" for n in range(1, 12)),
    "itself": "a: &a [*a]\n",
    "nested": "a: " + "[" * 150 + "]" * 150,
}


@pytest.mark.parametrize("name", BOMBS)
def test_aliases_are_counted_before_they_are_expanded(name: str) -> None:
    with pytest.raises(ValueError, match="nested too deeply|its aliases stand for more than"):
        check_yaml(yaml.SafeLoader(BOMBS[name]).get_single_node())


def test_aliases_of_an_honest_file() -> None:
    check_yaml(yaml.SafeLoader("base: &b {a: [1, 2]}\nc: {<<: *b, d: *b}\ne: *b\n").get_single_node())


def test_what_is_left_out_of_a_run(run: Path, private: Path) -> None:
    (run / "verdict.md").symlink_to(private / "id")
    (run / "rollouts").symlink_to(private)
    os.mkfifo(run / "logs" / "rank_00002.log")
    (run / "bundle_01234567" / "inputs").mkdir(parents=True)
    (run / "bundle").symlink_to("bundle_01234567")
    (run / "bundle_01234567" / "inputs" / "large").symlink_to(private)
    lines = left_out(run)
    assert [line.partition(":")[0] for line in lines] == ["rollouts", "verdict.md", "logs/rank_00002.log"]
    assert not any(str(private) in line for line in lines)
    for number in range(40):
        (run / "logs" / f"rank_{number + 100:05d}.log").symlink_to(private / "id")
    assert len(left_out(run)) == 21 and left_out(run)[-1] == "23 more links were not read"
