"""Every place that writes a file. One that is new has to say why another user cannot redirect it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.test_imports import PACKAGE, sources

# modules that write to the folder of a run, or of one of its parts, which `runtime/run_folder.py` has checked
IN_A_RUN = """
controller/busy engine/checkpoint/manifest engine/checkpoint/sharded_save engine/checkpoint/store model/hf_export
observe/record/archive observe/record/trackers observe/record/writer run/performance run/recovery run/replay run/saver
runtime/events runtime/exits runtime/job runtime/rank_status runtime/run_owner runtime/watchdog sandbox/worker
slurm/bundle slurm/submit workers/judge workers/weight_transfer
"""
ELSEWHERE = {
    "sandbox/new_files": "the place that opens files for the others",
    "sandbox/fork_server": "in a folder that mkdtemp has made",
    "sandbox/isolation": "/proc",
    "sandbox/mounts": "new files, in folders that it opens without links",
    "sandbox/task_archive": "new files, in folders of mounts",
    "sandbox/watched_child": "/proc",
    "sandbox/task_supervisor": "pipes; files by processes inside the sandbox",
    "sandbox/task_files": "in the tmpfs of its own mount namespace",
    "sandbox/process_tree": "/proc",
    "rollout/engines/vllm/core": "in a folder that mkdtemp has made",
    "data/downloaded": "in a folder that mkdtemp has made",
    "machine/measure": "a name with a random number",
    "machine/check_job": "a name with a random number",
    "runtime/world": "/dev/null",
    "runtime/node_memory": "in a folder of this user only, which it makes and checks",
    "engine/checkpoint/snapshot": "in that folder",
    "run/snapshots": "in that folder",
}
METHODS = {"write_text", "write_bytes", "touch", "symlink_to", "hardlink_to", "savefig"}
FUNCTIONS = {"FileHandler", "SummaryWriter", "write_table", "save_file", "copyfile", "copy2", "copytree", "HashedFile"}
MODES = {kind + end for kind in "wax" for end in ("", "b", "t", "+", "b+", "t+")} | {"r+", "r+b", "rb+"}
FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT"}


def writes(call: ast.Call) -> bool:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in ("open", "File"):
        return name in FUNCTIONS or (name in METHODS and isinstance(function, ast.Attribute))
    inside = [node for part in (*call.args, *(word.value for word in call.keywords)) for node in ast.walk(part)]
    texts = {node.value for node in inside if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return bool(texts & MODES or {node.attr for node in inside if isinstance(node, ast.Attribute)} & FLAGS)


def is_named_draft(call: ast.Call) -> bool:
    places = [*call.args, *([call.func.value] if isinstance(call.func, ast.Attribute) else [])]
    return any(isinstance(place, ast.Name) and place.id == "draft" for place in places)


def raw_writers() -> Iterator[tuple[str, int]]:
    """(module, line) of every write that is not to a `draft` of `draft_of`."""
    for path in sources():
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        has_drafts = any(isinstance(node, ast.Name) and node.id == "draft_of" for node in nodes)
        for node in nodes:
            if isinstance(node, ast.Call) and writes(node) and not (has_drafts and is_named_draft(node)):
                yield path.relative_to(PACKAGE).with_suffix("").as_posix(), node.lineno


def test_every_writer_is_in_a_checked_folder_or_uses_a_draft() -> None:
    known = {*IN_A_RUN.split(), *ELSEWHERE}
    found = list(raw_writers())
    wrong = [f"hpcrl/{module}.py:{line}" for module, line in found if module not in known]
    assert not wrong, f"use draft_of (hpcrl/sandbox/new_files.py), or say here why not: {wrong}"
    assert known == {module for module, _ in found}
