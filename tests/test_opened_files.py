"""Files of others are opened by `hpcrl.sandbox.foreign_files`; every place that reads other files is listed here, and
every place that listens."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hpcrl"
BY_NAME = {"read_text", "read_bytes", "safe_open", "from_file", "ParquetFile", "copyfile", "copy2", "copytree"}
BY_NAME |= {"from_pretrained", "load_file", "get_single_node"}
WHOLE = {"h5py.File", "np.load", "torch.load", "dcp.load", "yaml.load", "yaml.safe_load", "json.load", "library.open"}
LISTENS = {"create_server", "TCPStore", "init_process_group", "init_device_mesh", "bind", "listen", "Listener"}
LISTENS |= {"HTTPServer", "ThreadingHTTPServer", "TCPServer", "start_server", "start_unix_server", "Open_port"}
NAMES = {"open", *BY_NAME, *LISTENS, *(name.rpartition(".")[2] for name in WHOLE)}

OWN, PROC, USERS, CHECKED, MADE = (
    "the package's own file",
    "/proc and /sys",
    "a file that the user names for this job",
    "checked by foreign_files before",
    "a file that this job made",
)
ELSEWHERE = {  # module -> how many places, and which files
    "engine/checkpoint/manifest.py": (4, f"{CHECKED}, or {MADE}: hashed"),
    "engine/checkpoint/sharded_load.py": (2, CHECKED),
    "engine/checkpoint/snapshot.py": (1, MADE),
    "engine/checkpoint/store.py": (1, "flushed, not read"),
    "cli.py": (1, OWN),
    "config/start_folder.py": (1, OWN),
    "config/yaml_core.py": (1, "text that was read"),
    "controller/busy.py": (2, MADE),
    "data/images.py": (1, CHECKED),
    "data/judge_prompts.py": (1, USERS),
    "data/pictures.py": (1, f"{USERS}: a regular file"),
    "data/row_file.py": (5, USERS),
    "data/source.py": (3, USERS),
    "data/chat.py": (1, PROC),
    "data/tokenizer.py": (2, CHECKED),
    "jobs/score.py": (1, MADE),
    "kernels/onednn.py": (1, PROC),
    "model/hf_files.py": (1, CHECKED),
    "observe/report/page.py": (3, OWN),
    "run/inference.py": (2, MADE),
    "run/predicted.py": (1, PROC),
    "run/pairs.py": (1, MADE),
    "machine/check_job.py": (2, MADE),
    "machine/facts.py": (4, f"{MADE}; {PROC}"),
    "runtime/launcher.py": (1, PROC),
    "run/snapshots.py": (1, MADE),
    "runtime/events.py": (1, MADE),
    "runtime/gpus.py": (2, PROC),
    "runtime/node_memory.py": (2, MADE),
    "machine/measure.py": (2, f"{MADE}; {PROC}"),
    "runtime/run_folder.py": (2, PROC),
    "runtime/sockets.py": (2, PROC),
    "runtime/watchdog.py": (1, MADE),
    "sandbox/mounts.py": (2, PROC),
    "sandbox/task_archive.py": (1, f"{CHECKED}: its contents are"),
    "sandbox/task_supervisor.py": (4, "pipes; files inside the sandbox by processes there"),
    "sandbox/task_files.py": (1, "the task's folder, links as links, into a tmpfs"),
    "sandbox/process_tree.py": (6, PROC),
    "sandbox/fork_server.py": (2, f"{PROC}; {MADE}"),
    "sandbox/new_files.py": (1, "appended to, not read"),
    "sandbox/worker.py": (1, PROC),
    "slurm/bundle.py": (4, f"{OWN}; {USERS}; {MADE}"),
    "observe/read/archive.py": (1, CHECKED),
    "observe/record/archive.py": (1, "flushed, not read"),
    "run/replay.py": (1, MADE),
    "observe/read/token_text.py": (1, "text that was read"),
    "observe/record/tracker_wandb.py": (1, MADE),
    "observe/record/trackers.py": (2, MADE),
    "observe/record/writer.py": (1, MADE),
    "observe/trace/records.py": (1, PROC),
    "workers/judge.py": (1, MADE),
}

LISTENERS = {  # module -> how many places, and what listens; docs/security.md says until when and to whom
    "rollout/environments/chat_server.py": (
        3,
        "a port of loopback or a Unix socket, for clients with the trajectory's key",
    ),
    "rollout/engines/tensorrt_llm/signatures.py": (1, "nothing: arguments of a signature"),
    "run/rollouts/streaming.py": (1, "nothing: the controller's own method"),
    "runtime/groups.py": (1, "torch's fake process group: nothing"),
    "runtime/gpus.py": (2, "nothing: CPUs of a process"),
    "runtime/sockets.py": (1, "nothing: describes a socket"),
    "runtime/key_value_store.py": (1, "rank 0, for the ranks that have the secret"),
    "runtime/store.py": (3, "rank 0, for torch's store; the other ranks connect to it"),
    "runtime/world.py": (1, "gloo and NCCL, as torch opens them"),
}


def reads_a_file(call: ast.Call) -> bool:
    """Whether a call opens a file to read it, other than by `foreign_files`."""
    name, called = call.func, ast.unparse(call.func)
    last = called.rpartition(".")[2]
    if last in LISTENS:
        return False
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    texts = [node.value for it in given for node in ast.walk(it) if isinstance(node, ast.Constant)]
    modes = [text for text in texts if isinstance(text, str) and text and set(text) <= set("rwaxbt+")]
    if called == "os.open":
        return not any(word in ast.unparse(call) for word in ("O_WRONLY", "O_PATH", "os.devnull"))
    if any(mode[0] in "wax" or mode == "r+" for mode in modes):
        return False
    if isinstance(name, ast.Name):  # `read_text` and `read_bytes` are then those of `foreign_files`
        return called == "open" or called in BY_NAME - {"read_text", "read_bytes"}
    return called in WHOLE or last in BY_NAME or last == "open" and bool(modes)


@cache
def calls() -> list[tuple[str, ast.Call]]:
    """(module, call) of the package, of functions of these names."""
    found = []
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.glob("kernels/*.py")]):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        name = path.relative_to(PACKAGE).as_posix()
        nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
        found += [(name, node) for node in nodes if getattr(node.func, "attr", getattr(node.func, "id", "")) in NAMES]
    return found


def test_files_of_others_are_opened_in_one_way() -> None:
    found = Counter(name for name, call in calls() if reads_a_file(call))
    del found["sandbox/foreign_files.py"]
    wrong = [
        f"hpcrl/{name} opens files in {found[name]} places, and {ELSEWHERE.get(name, (0,))[0]} are listed here: use "
        "hpcrl.sandbox.foreign_files, or say which files they are"
        for name in sorted({*ELSEWHERE, *found})
        if found[name] != ELSEWHERE.get(name, (0,))[0]
    ]
    assert not wrong, "\n".join(wrong)


def test_places_that_listen_are_known() -> None:
    found = Counter(name for name, call in calls() if ast.unparse(call.func).rpartition(".")[2] in LISTENS)
    listed = {name: number for name, (number, _) in LISTENERS.items()}
    assert found == listed, "list the place here, and in the table of docs/security.md what it opens"


def test_no_code_of_a_model_is_allowed() -> None:
    for name, call in calls():
        if ast.unparse(call.func).endswith(".from_pretrained"):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert given.get("trust_remote_code") == "False", f"hpcrl/{name}:{call.lineno}: trust_remote_code=False"
