"""Hostile run folders, for `attack.py`: what `report`, `samples`, `status`, `trace` and `scalars` do with them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from attack_files import ALIASES, DEEP, SHOWN, TOKENIZER, job, model
from attack_place import Place, Reached, attack

RUN = "run folder"


def write_run(run: Path, text: str) -> Path:
    """A run as a job leaves it, with `text` where a run has text."""
    import numpy as np

    from hpcrl.observe.record.archive import RecordLog, RolloutLog, finish_step, log_path
    from hpcrl.observe.trace.records import trace_path

    files = {
        "config.yaml": json.dumps({"run": {"name": text, "dir": text}, "model": {"tokenizer": "tokenizer"}}),
        "metrics.jsonl": json.dumps({"step": 1, "critic/score/mean": 0.5, f"a/{text}": 1, "timing_s/step": 1}) + "\n",
        "exit.json": json.dumps({"code": 1, "rank": 0, "role": text, "phase": text, "error": text}),
        "times.json": json.dumps({"total_steps": 3, "step_s": 1.0, text: text}),
        "slices.json": json.dumps([{"job": text, "ends_at": 1e9, "host": text}]),
        "verdict.md": f"# Hang\n\n{text}\nno progress for 612 s\n",
        "logs/rank_00000.log": f"2026-11-25 10:00:00,123 WARNING hpcrl: {text}\n",
        "heartbeat/rank_00000": json.dumps({"phase": text}),
        "owner/00000001.json": json.dumps({"host": text, "pid": 1, "job": text}),
        "checkpoints/latest": text,
        "checkpoints/step_00000001/trainer.json": json.dumps({"step": 1, "versions": {text: text}}),
    }  # fmt: skip
    for name, content in files.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(content, encoding="utf-8", errors="surrogatepass")
    shutil.copytree(TOKENIZER, run / "tokenizer")
    log = RolloutLog(log_path(run / "rollouts", 1, 0))
    one = np.ones(2, np.float32)
    log.append_sample(
        {"input_ids": np.array([3, 4, 5], np.int32), "response_mask": np.ones(2, np.int32), "rollout_log_probs": -one},
        {"position": 0, "uid": text, "sample_index": 0, "data_source": text, "prompt_length": 1, "response_length": 2,
         "finish_reason": text, "score": np.float32(0.5), "acc": 1.0, "extras": json.dumps({text: text})},
    )  # fmt: skip
    log.close()
    finish_step(run / "rollouts", 1, seed=0, weight_version=1, report=print)
    trace = RecordLog(trace_path(run, 0))
    trace.append({"step": 1, "rank": 0, "node": text})
    trace.close()
    events = run / "tensorboard" / "events.out.tfevents.1700000000.host.1.0"
    events.parent.mkdir()
    events.write_bytes(struct.pack("<QI", 9, 0) + b"\x09" + bytes(8) + bytes(4) + text.encode("utf-8", "replace"))
    return run


def read_run(place: Place, run: Path, commands: str = "report samples status trace scalars") -> str:
    """What the commands print that read a run of others, and the page."""
    said = ""
    for command in commands.split():
        out = ("--out", place.out / f"{command}.html") if command in ("report", "trace") else ()
        name = ("report", "--scalars") if command == "scalars" else (command,)
        out = ("--text",) if command == "samples" else out  # JSON in a pipe is UTF-8 as it is
        said += place.hpcrl(*name, run, *out, codes=(0, 1, 2), lines=10)
    page = place.out / "report.html"
    text = page.read_text() if page.exists() else ""
    place.check(said)
    if "<script>alert(1)" in text or "\u202e" in text or "\x9b" in text:
        raise Reached("the page has hostile text as it is")
    return said + text


@attack(RUN, "files that are links to those of a private run", "report samples status trace scalars", is_fast=True)
def links_of_a_run(place: Place) -> None:
    private = write_run(place.private / "run", place.secret)
    for is_deep in (True, False):
        run = place.theirs / f"run_{is_deep}"
        run.mkdir()
        for path in sorted(private.rglob("*") if is_deep else private.iterdir()):
            target = run / path.relative_to(private)
            target.mkdir() if is_deep and path.is_dir() else target.symlink_to(path)
        read_run(place, run)


@attack(RUN, "pipes, devices and sparse files of 1 TB", "report samples status trace scalars")
def special_files_of_a_run(place: Place) -> None:
    makes: list[Callable[[Path], None]] = [os.mkfifo, lambda path: path.symlink_to("/dev/zero")]
    makes += [lambda path: os.truncate(_empty(path), 1 << 40), _socket]
    for number, make in enumerate(makes):
        run = write_run(place.theirs / f"r{number}", "x")
        for path in [path for path in run.rglob("*") if path.is_file()]:
            path.unlink()
            make(path)
        read_run(place, run)


@attack("control", "no attack: an honest model, run and job pass", "report samples status plan data", is_fast=True)
def honest(place: Place) -> None:
    run = write_run(place.theirs / "run", "honest")
    shutil.rmtree(run / "owner")
    for command in ("report", "samples", "status"):
        if "honest" not in place.hpcrl(command, run, codes=(0,)) and command == "samples":
            raise Reached("`samples` shows no sample")
    model(place)
    config = job(place)
    place.hpcrl("plan", config, codes=(0,))
    place.hpcrl("data", "show", place.root / "rows.jsonl", "--job", "train", config, codes=(0,))


def _empty(path: Path) -> Path:
    path.touch()
    return path


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # sockets have short names
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)
    os.chdir(here)


@attack(
    RUN,
    "controls of terminals, scripts and marks in all texts and names",
    "report samples status trace scalars",
    is_fast=True,
)
def texts_of_a_run(place: Place) -> None:
    run = write_run(place.theirs / "run\n\x1b[31m-rf \u202e", SHOWN)
    for name in ("logs/rank_00001\n\x1b[2J.log", "rollouts/step_00000002.h5\n", "-rf", "checkpoints/step_00000002\x1b"):
        (run / name).write_text(SHOWN)
    read_run(place, run)
    place.hpcrl("status", place.theirs)


@attack(RUN, "YAML and JSON: aliases, depth, other types", "report samples status trace scalars", is_fast=True)
def values_of_a_run(place: Place) -> None:
    run = write_run(place.theirs / "run", "x")
    shutil.rmtree(run / "owner")  # `status` would wait for its heartbeats each time
    link = {"command": 3, "nodes": "x", "ntasks_per_node": [], "job": 4, "runs": [5, "\0", {}], "folder": None}
    other = json.dumps(
        {"model": {"tokenizer": ["x"]}, "run": 3, "links": [link], "code": [], "step": 1, "total_steps": []}
    )
    for text in (ALIASES, DEEP, '"x"', "[]", other, '{"links": [], "code": 1e999}'):
        for name in ("config.yaml", "exit.json", "times.json", "slices.json", "metrics.jsonl", "chain.json"):
            (run / name).write_text(text)
        read_run(place, run, "report status samples")


@attack(RUN, "configs that name private files and variables", "report samples status", is_fast=True)
def names_in_a_run(place: Place) -> None:
    private = write_run(place.private / "run", place.secret)
    (place.private / "other.yaml").write_text(f"run: {{name: {place.secret}}}\n")
    run = write_run(place.theirs / "run", "x")
    link = {"command": "train", "nodes": 1, "ntasks_per_node": 1, "job": "1", "runs": [str(private)], "folder": "x"}
    (run / "chain.json").write_text(json.dumps({"links": [link]}))
    for config in (
        {"extends": str(place.private / "other.yaml")},
        {"run": {"name": "${oc.env:HPCRL_ATTACK_SECRET}", "dir": "$HPCRL_ATTACK_SECRET"}, "extends": str(place.key)},
        {"model": {"tokenizer": str(place.private)}, "run": {"dir": "../" * 20}},
    ):  # fmt: skip
        (run / "config.yaml").write_text(json.dumps(config))
        (run / "checkpoints" / "latest").write_text("../../../private")
        read_run(place, run, "report")  # which prints the state of this run
        if "failed" in read_run(place, run, "samples status").partition("<html")[0]:
            raise Reached("the state of a private run was read")


@attack(RUN, "HDF5: links and values in other files, bombs", "samples report")
def archives(place: Place) -> None:
    import h5py
    import numpy as np

    private = write_run(place.private / "run", place.secret) / "rollouts" / "step_00000001.h5"
    strings = h5py.string_dtype()

    def external(file: h5py.File) -> None:
        for name in ("uid", "data_source", "finish_reason", "extras"):
            del file[f"samples/{name}"]
            file[f"samples/{name}"] = h5py.ExternalLink(str(private), f"samples/{name}")

    def virtual(file: h5py.File) -> None:
        layout = h5py.VirtualLayout((1,), strings)
        layout[:] = h5py.VirtualSource(str(private), "samples/uid", (1,))
        del file["samples/uid"]
        file.create_virtual_dataset("samples/uid", layout)

    def raw(file: h5py.File) -> None:
        del file["samples/score"]
        file.create_dataset("samples/score", (4,), "u8", external=[(str(place.key), 0, 32)])

    def filled(file: h5py.File) -> None:
        del file["samples/score"]
        file.create_dataset("samples/score", (2**36,), "f8", fillvalue=1.0, chunks=(2**20,))

    def packed(file: h5py.File) -> None:
        del file["samples/uid"]
        file.create_dataset("samples/uid", (2**24,), "S64", compression="gzip", data=np.zeros(2**24, "S64"))

    for number, change in enumerate((external, virtual, raw, filled, packed)):
        run = write_run(place.theirs / f"r{number}", "x")
        with h5py.File(run / "rollouts" / "step_00000001.h5", "r+") as file:
            change(file)
        read_run(place, run, "samples report")


@attack(RUN, "event files, traces and logs with false lengths", "report trace scalars", is_fast=True)
def lengths_of_a_run(place: Place) -> None:
    run = write_run(place.theirs / "run", "x")
    for header in (struct.pack("<QI", 2**63, 0), struct.pack("<QI", 2**26 - 1, 0), b"\xdd\xff\xff\xff\xff" * 99):
        for name in ("tensorboard/events.out.tfevents.1700000000.host.1.0", "trace/rank_00000.log"):
            (run / name).write_bytes(header + b"x" * 99)
        (run / "logs" / "rank_00000.log").write_bytes(b"\0" * 10**7 + b"9" * 10**6)
        (run / "metrics.jsonl").write_bytes(b'{"step": ' + b"9" * 10**5 + b"}\n" + b'{"step": 1e308}\n' * 99)
        read_run(place, run, "report trace scalars")


@attack(
    RUN,
    "modules with the names of Python's in the folder where the user is",
    "report samples status trace",
    is_fast=True,
)
def modules_of_a_run(place: Place) -> None:
    run = write_run(place.theirs / "run", "x")
    for name in ("argparse", "yaml", "numpy", "h5py", "json", "logging", "sitecustomize"):
        (run / f"{name}.py").write_text(place.code)
    for command in ("report", "samples", "status", "trace"):
        place.hpcrl(command, ".", cwd=run, codes=(0, 1, 2), lines=10)
