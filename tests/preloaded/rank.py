"""In the place of `python ...` for a rank of a job under test: the same program in a process that is preloaded.

    mpiexec -n 4 python -I -S tests/preloaded/rank.py -m hpcrl train job.yaml

`server.py`, at the socket that HPCRL_TEST_SERVER names, forks a process that has torch and megatron-core already, with
this process's arguments, environment, directory, limits, files and host name. This process passes its signals on and
ends as that one ends; when this one is killed, that one is killed. Without a server, and for `-c`, it becomes
`python ...` itself.

It imports little on purpose: a rank costs 20 ms to start this way, not seconds.
"""

import array
import json
import os
import resource
import signal
import socket
import sys

LIMITS = ("RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_CORE", "RLIMIT_AS")
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG)


def main() -> None:
    address = os.environ.pop("HPCRL_TEST_SERVER", "")
    if not address or sys.argv[1] == "-c":
        # -S hid the environment's packages from this process only
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    launcher = [int(os.environ["PMI_FD"])] if "PMI_FD" in os.environ else []  # its pipe, which ranks inherit
    request = {
        "argv": sys.argv[1:],
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
        "files": [0, 1, 2, *launcher],
    }
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address)
    body = json.dumps(request).encode()
    host = os.open("/proc/self/ns/uts", os.O_RDONLY)  # a node of tools/slurm_lab.sh has a host name of its own
    files = array.array("i", [*request["files"], host]).tobytes()
    connection.sendmsg([len(body).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
    connection.sendall(body)
    for file in (*launcher, host):
        os.close(file)
    answers = connection.makefile("rb")
    rank = int(answers.readline())
    for number in PASSED_ON:
        signal.signal(number, lambda number, frame: os.kill(rank, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    code = int(answers.readline() or -signal.SIGKILL)  # without an answer the server is gone, and the rank with it
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
