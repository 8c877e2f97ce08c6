"""The supervisor that `program.run_python` starts: runs one program in a child, enforces its limits, and cleans up.

It runs without site-packages (`python -I -S`), which halves its start-up time. Job and result are passed by marshal
through its standard input and output, which the child does not have.
"""

from __future__ import annotations

import marshal
import os
import resource
import signal
import sys
from math import ceil
from typing import NoReturn

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from hpcrl.sandbox import isolation, process_tree, seccomp
from hpcrl.sandbox.watched_child import (
    MAX_SIGNALS,
    MAX_THREADS,
    MB,
    Child,
    Output,
    limit_threads,
    sealed_file,
    set_limits,
    watch,
)

MAX_OPEN_FILES = 256  # of each process
OUT_OF_MEMORY = 240  # exit code of the child after a MemoryError


def main() -> None:
    source, stdin, limits, folder, packages, isolated = marshal.loads(sys.stdin.buffer.read())
    network, shown, _ = isolated
    parent = os.getppid()
    wake, _ = process_tree.wake_on_signals()
    process_tree.adopt_orphans()
    try:
        if network:
            isolation.unshare_namespaces()
        if not shown:
            os.mkdir(folder, 0o700)
        process_tree.signal_on_parent_death(parent, process_tree.END)  # after `unshare_namespaces`, which resets it
        child = start(source, stdin, limits, folder, packages, isolated)
        excess = watch(child, wake, limits[0], limits[4], lambda: limits[1] * MB - sockets(network))
    finally:
        process_tree.kill_descendants()
        if not shown:
            isolation.remove_folder(folder)
    stdout, stderr = (bytes(output.data[: output.most]) for output in child.output.values())
    sys.stdout.buffer.write(marshal.dumps((*outcome(child, excess, limits[0]), stdout, stderr)))


def sockets(network: bool) -> int:
    """Bytes that the program's sockets can hold.

    Args:
        network: whether it has a network namespace of its own.
    """
    return process_tree.socket_bytes() if network else 0


def start(source: str, stdin: bytes, limits: tuple, folder: str, packages: list[str], isolated: tuple) -> Child[Output]:
    """Fork. In the child, run the program and do not return."""
    given = sealed_file(stdin)
    (stdout, stdout_writer), (stderr, stderr_writer) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for number, file in enumerate((given, stdout_writer, stderr_writer)):
                os.dup2(file, number)
            os.closerange(3, 1 << 16)
            confine(limits, folder, *isolated)
        except BaseException as error:
            os.write(2, f"the sandbox cannot be set up: {error}\n".encode())
            os._exit(1)
        run(source, packages)
    for file in (given, stdout_writer, stderr_writer):
        os.close(file)
    return Child(pid, {pipe: Output(limits[3] * 1024) for pipe in (stdout, stderr)})


def confine(limits: tuple, folder: str, network: bool, shown: list[str], filtered: bool) -> None:
    """Apply limits and isolation that the program cannot undo."""
    seconds, memory_mb, file_mb, _, _ = limits
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGCHLD, process_tree.END):
        signal.signal(signum, signal.SIG_DFL)
    # what the program forks can be terminated, as multiprocessing's pools do it
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    os.setsid()  # otherwise `os.kill(0, ...)` would reach the supervisor too
    process_tree.signal_on_parent_death(os.getppid())
    process_tree.raise_oom_score()
    if network:
        limit_threads(MAX_THREADS - 1)  # beside this one
    if shown:
        isolation.enter(shown, file_mb)
        folder = isolation.FOLDER
    if network:
        isolation.give_up_privileges()
    os.chdir(folder)
    os.environ.update(HOME=folder, TMPDIR=folder, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    cpu = ceil(seconds) + 1
    set_limits(
        (
            (resource.RLIMIT_AS, memory_mb * MB),
            (resource.RLIMIT_CPU, cpu),
            (resource.RLIMIT_FSIZE, file_mb * MB),
            (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
            (resource.RLIMIT_SIGPENDING, MAX_SIGNALS),
            (resource.RLIMIT_CORE, 0),
        )
    )
    seccomp.leave_keyring()
    try:
        seccomp.install()
    except OSError:
        if filtered:
            raise


def run(source: str, packages: list[str]) -> NoReturn:
    """Run the code as a main module, then end the process as Python would."""
    import atexit
    import site
    import threading

    code = 1
    try:
        sys.path[:] = [*sys.path[1:], *packages]
        site.setquit()  # exit() and quit(), which programs use
        sys.argv = ["solution.py"]
        for name in [name for name in sys.modules if name.split(".")[0] == "hpcrl"]:
            del sys.modules[name]
        main = sys.modules["__main__"] = type(sys)("__main__")
        main.__dict__["__file__"] = "solution.py"
        exec(compile(source, "solution.py", "exec"), main.__dict__)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if code and not isinstance(leaving.code, int):
            print(leaving.code, file=sys.stderr)
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException as error:
        import traceback

        traceback.print_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
    finally:
        try:
            threading._shutdown()  # type: ignore[attr-defined]  # waits for the program's threads
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        except MemoryError:
            code = OUT_OF_MEMORY
        except BaseException:
            code = code or 1
        finally:
            os._exit(code & 0xFF)


def outcome(child: Child[Output], excess: str | None, seconds: float) -> tuple[str, int]:
    """(fate, return code)."""
    if excess is not None or child.status is None:
        return excess if excess in ("timeout", "memory") else "killed", -signal.SIGKILL
    code = os.waitstatus_to_exitcode(child.status)
    if code == OUT_OF_MEMORY:
        return "memory", 1
    if code < 0:
        return "timeout" if child.cpu_seconds >= seconds else "killed", code
    return "ok" if code == 0 else "error", code


if __name__ == "__main__":
    main()
