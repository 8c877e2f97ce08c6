"""Forks ranks of jobs under test from a process that has imported what they import; `rank.py` asks for them.

    python tests/preloaded/server.py SOCKET [MODULE...]

Starting Python with torch and megatron-core costs a rank seconds of CPU time, and the tests start hundreds of ranks. A
forked rank runs the program that it is asked for from its first line on: MPI, torch's threads and the children's
server start in it, after the fork, as nothing here starts them. Tests of the start itself, of process families and of
what a rank imports start real ranks.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

PRELOADED = (
    *("hpcrl.cli", "hpcrl.config.loader", "hpcrl.config.derive", "hpcrl.run.job_config", "hpcrl.jobs.train"),
    *("hpcrl.jobs.sft", "hpcrl.jobs.rm", "hpcrl.jobs.generate", "hpcrl.jobs.evaluate"),
    *("hpcrl.jobs.convert", "hpcrl.jobs.score", "hpcrl.run.job_config"),
    *("numpy.random", "h5py", "torch.utils.tensorboard.writer"),
    *("hpcrl.engine.checkpoint.sharded_load", "hpcrl.engine.checkpoint.sharded_save", "hpcrl.forecast.dry_run"),
)


def preload(more: list[str]) -> None:
    """Import what a rank imports, and `more`; start nothing: a fork takes no thread along, and MPI comes after it."""
    from hpcrl.runtime import platform

    platform.import_megatron()
    for name in (*PRELOADED, *more):
        __import__(name)
    platform.install()
    if importlib.util.find_spec("vllm") is not None:
        from hpcrl.rollout.engines.vllm.core import import_vllm

        import_vllm()
    from hpcrl.data.tokenizer import load_tokenizer

    load_tokenizer(str(Path(__file__).parents[2] / "configs" / "tokenizer"))
    if "mpi4py.MPI" in sys.modules:
        raise SystemExit("preloaded/server.py: error: MPI is loaded; no imported module may do that")
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise SystemExit(f"preloaded/server.py: error: an imported module has started threads ({threads} run)")
    gc.freeze()  # the collector of a rank does not touch these objects, so that their memory stays shared


class Request:
    """A connection of rank.py: what it asks for, and the process that runs it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        head, self.files, *_ = socket.recv_fds(connection, 8, 8)
        length = int.from_bytes(head, "little")
        body = b""
        while len(body) < length:
            if not (part := connection.recv(length - len(body))):
                raise ConnectionError("rank.py was killed")
            body += part
        self.asked: dict[str, Any] = json.loads(body)
        self.process = 0

    def answer(self, number: int) -> None:
        try:
            self.connection.sendall(b"%d\n" % number)
        except OSError:
            pass  # rank.py was killed

    def enter(self) -> None:
        """In the forked process: take over host name, files, limits, environment and directory."""
        self.connection.close()
        *files, host = self.files
        if os.fstat(host).st_ino != os.stat("/proc/self/ns/uts").st_ino:
            if ctypes.CDLL(None, use_errno=True).setns(host, 0) < 0:
                raise OSError(ctypes.get_errno(), "cannot take over the host name")
        os.close(host)
        # above all numbers that are asked for, so that none is overwritten before it is copied
        high = [os.dup2(file, 200 + file) for file in files]
        for file in files:
            os.close(file)
        for source, target in zip(high, self.asked["files"], strict=True):
            os.dup2(source, target)
            os.close(source)
        for name, values in self.asked["limits"].items():
            resource.setrlimit(getattr(resource, name), tuple(values))
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # the old one may believe that it can seek
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
        os.environ.clear()
        os.environ.update(self.asked["environment"])
        os.chdir(self.asked["directory"])
        tempfile.tempdir = None  # it depends on the environment


def serve(path: str) -> Request:
    """Fork until the parent is gone. Returns in forked processes only, with what to run."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(64)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)  # closes when the parent is gone
    running: dict[int, Request] = {}
    spent, cpu_file = 0.0, Path(f"{path}.cpu")
    while True:
        # one event at a time: handling it may close what another of the same call is about
        for key, _ in selector.select()[:1]:
            if key.fileobj is sys.stdin:
                for request in running.values():
                    os.kill(request.process, signal.SIGKILL)
                os._exit(0)
            if key.fileobj is listener:
                connection, _ = listener.accept()
                try:
                    request = Request(connection)
                except (OSError, ValueError):
                    connection.close()
                    continue
                request.process = os.fork()
                if request.process == 0:
                    selector.close()
                    listener.close()
                    for file, other in running.items():
                        os.close(file)
                        other.connection.close()
                    request.enter()
                    return request
                for file in request.files:
                    os.close(file)
                request.answer(request.process)
                end = os.pidfd_open(request.process)
                running[end] = request
                selector.register(end, selectors.EVENT_READ)
                selector.register(connection, selectors.EVENT_READ, end)
            elif key.data is not None:  # rank.py was killed; the process's end is seen below
                selector.unregister(key.fileobj)
                os.kill(running[key.data].process, signal.SIGKILL)
            else:
                end = key.fd
                request = running.pop(end)
                _, status, usage = os.wait4(request.process, 0)
                spent += usage.ru_utime + usage.ru_stime
                draft = cpu_file.with_suffix(".draft")
                draft.write_text(f"{spent:.3f}")
                draft.replace(cpu_file)  # a reader finds a whole number
                selector.unregister(end)
                os.close(end)
                if request.connection in selector.get_map():
                    selector.unregister(request.connection)
                request.answer(os.waitstatus_to_exitcode(status))
                request.connection.close()


def run(argv: list[str]) -> None:
    """What `python argv...` does, for a module or a script."""
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    preload(sys.argv[2:])
    request = serve(sys.argv[1])
    run(request.asked["argv"])
