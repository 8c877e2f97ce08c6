"""slurm/common.sh: which interface, PMI and Python are taken, and what becomes of an exit code."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMON = ROOT / "slurm" / "common.sh"
TEMPLATES = sorted((ROOT / "slurm").iterdir())

ETH = "2: eth0    inet 10.1.0.7/16 brd 10.1.255.255 scope global eth0\\       valid_lft forever preferred_lft forever"
USB = "3: enp0s20u1    inet 169.254.3.1/24 brd 169.254.3.255 scope link enp0s20u1\\  valid_lft forever"
DOCKER = "9: docker0    inet 172.17.0.1/16 brd 172.17.255.255 scope global docker0\\  valid_lft forever"
LO = "1: lo    inet 127.0.0.1/8 scope host lo\\       valid_lft forever preferred_lft forever"
IB = "5: ib0    inet 10.9.0.7/16 brd 10.9.255.255 scope global ib0\\       valid_lft forever preferred_lft forever"
MANAGEMENT = "4: eno1    inet 192.168.1.7/24 brd 192.168.1.255 scope global eno1\\  valid_lft forever"
OVER_ETH = "default via 10.1.0.1 dev eth0 proto dhcp"
OVER_DOCKER = "default via 172.17.0.1 dev docker0"


def bash(script: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs `script` after common.sh, without this job's own Slurm variables."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HPCRL_"))}
    return subprocess.run(
        ["bash", "-c", f"source {COMMON}; {script}", "bash", *arguments],
        capture_output=True,
        text=True,
        env=clean | environ,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job of a shell ignores it
    )


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_templates_are_valid_bash(path: Path) -> None:
    checked = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
    assert checked.returncode == 0 and not checked.stderr


@pytest.mark.parametrize(
    ("addresses", "routes", "chosen"),
    [
        ([LO, ETH], OVER_ETH, "eth0"),
        ([LO, MANAGEMENT, ETH], OVER_ETH, "eth0"),
        ([LO, MANAGEMENT, ETH, IB], OVER_ETH, "ib0"),
        ([LO, ETH.replace("eth0", "hsn0"), MANAGEMENT], OVER_ETH, "hsn0"),
        ([LO, USB, DOCKER, ETH], OVER_ETH, "eth0"),
        ([LO, DOCKER, MANAGEMENT], OVER_DOCKER, "eno1"),
        ([LO, IB.replace("10.9.0.7", "169.254.0.7"), ETH], OVER_ETH, "eth0"),
        ([LO, USB, DOCKER], OVER_DOCKER, ""),
        ([LO, ETH.replace("eth0", "eth01"), MANAGEMENT], "default via 192.168.1.1 dev eno1 metric 5", "eno1"),
        ([], "", ""),
    ],
)
def test_interface_leads_to_other_nodes(addresses: list[str], routes: str, chosen: str) -> None:
    found = bash('hpcrl_interface "$1" "$2"', "\n".join(addresses), routes)
    assert found.stdout.strip() == chosen and found.returncode == 0


def test_users_own_interface_stays_and_one_node_stays_on_loopback() -> None:
    show = 'hpcrl_choose_network; echo "$NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME $UCX_NET_DEVICES"'
    mine = bash(show, SLURM_JOB_NUM_NODES="2", HPCRL_INTERFACE="eth7", NCCL_SOCKET_IFNAME="mine")
    assert mine.stdout.split()[:2] == ["mine", "eth7"] and mine.stdout.split()[2].endswith("eth7")
    assert bash(show, SLURM_JOB_NUM_NODES="1").stdout.split() == ["lo", "lo", "lo"]


def test_what_a_person_exported_counts_more_than_the_site_and_both_are_shown() -> None:
    site = "hpcrl_set NCCL_NET 'AWS Libfabric'; hpcrl_set NCCL_PROTO LL; hpcrl_set FI_X 1; "
    site += "hpcrl_set NCCL_SOCKET_IFNAME hsn0,hsn1; hpcrl_choose_network; "
    show = 'printenv NCCL_NET NCCL_PROTO FI_X NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME; echo "${hpcrl_names[*]}"'
    nodes = {"SLURM_JOB_NUM_NODES": "2", "HPCRL_INTERFACE": "hsn0"}
    several = bash(site + show, NCCL_NET="Socket", FI_X="1", **nodes)
    assert several.stdout.splitlines() == [
        *("Socket", "LL", "1", "hsn0,hsn1", "hsn0"),
        "NCCL_NET NCCL_PROTO FI_X NCCL_SOCKET_IFNAME NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME UCX_NET_DEVICES",
    ]
    kept = "hpcrl: kept NCCL_NET=Socket, which is exported; the site has AWS Libfabric (unset NCCL_NET to use it)\n"
    assert several.stderr == kept
    one = bash(site + 'echo "$NCCL_NET,$NCCL_PROTO,$NCCL_SOCKET_IFNAME"', SLURM_JOB_NUM_NODES="1")
    assert (one.stdout, one.stderr) == (",LL,lo\n", "")  # ranks of one node need no network


def test_containers_and_mpiexec_pass_the_sites_variables_on(site: Site) -> None:
    begin = "hpcrl_set NCCL_NET 'AWS Libfabric'; hpcrl_set NCCL_PROTO ^LL128; "
    path = {"PATH": f"{site.bin}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "2"}
    for runtime in ("apptainer", "singularity"):
        script = f"{begin}hpcrl_python=({runtime} exec); hpcrl_pass_variables; printenv {runtime.upper()}ENV_NCCL_NET"
        assert bash(script, **path).stdout == "AWS Libfabric\n"
    pyxis = begin + 'hpcrl_srun_options=(--container-image=a); hpcrl_pass_variables; echo "${hpcrl_srun_options[*]}"'
    assert bash(pyxis, **path).stdout == "--container-image=a\n"  # of a Pyxis before 0.16
    site.command("srun", "echo --container-env=NAME")
    assert bash(pyxis, **path).stdout == "--container-image=a --container-env=NCCL_NET,NCCL_PROTO\n"

    launch = begin + "export HPCRL_END_TIME=7; hpcrl_python=(python3); hpcrl_mpiexec train x.yaml"
    for version, passed in (("HYDRA build details:", ""), ("mpiexec (Open MPI) 5.0.11", "-x NCCL_NET -x NCCL_PROTO ")):
        site.command("mpiexec", f'[[ $1 != --version ]] || {{ echo "{version}"; exit; }}; printf "%s " "$@"')
        words = bash(launch, SLURM_NTASKS="3", **path).stdout
        assert words.startswith(f"-n 3 {passed}") and words.endswith("python3 -m hpcrl train x.yaml ")
        assert ("-x HPCRL_END_TIME" in words) == bool(passed)
    site.command("mpiexec", f'exec {Path(sys.executable).parent}/mpiexec "$@"')
    real = begin + """hpcrl_python=(bash -c 'echo "$NCCL_NET"'); hpcrl_mpiexec"""
    assert bash(real, SLURM_NTASKS="2", **path).stdout == "AWS Libfabric\n" * 2


@pytest.mark.parametrize(
    ("library", "offered", "pmi"),
    [
        ("MPICH Version: 5.0.2", "pmix none pmi2", "pmi2"),
        ("Open MPI v5.0.11, package: x", "pmix\n\tpmix_v4\n\tpmi2", "pmix"),
        ("MPI VERSION    : CRAY MPICH version 8.1", "cray_shasta pmi2 none", "cray_shasta"),
        ("MPI VERSION    : CRAY MPICH version 8.1", "pmi2 none", "pmi2"),
        ("Open MPI v5.0.11", "pmi2 none", ""),
    ],
)
def test_pmi_is_what_the_library_speaks_and_the_site_offers(library: str, offered: str, pmi: str) -> None:
    assert bash('hpcrl_pmi_for "$1" "$2"', library, offered).stdout.strip() == pmi


@pytest.mark.parametrize(
    ("said", "end"),
    [("2026-11-21T22:00:00", "1795298400"), ("", "none"), ("N/A", "none"), ("Unknown", "none")],
)
def test_the_end_is_known_or_left_open(said: str, end: str) -> None:
    """An empty date would be last midnight, and the allocation over before it began."""
    script = f'squeue() {{ echo "{said}"; }}; hpcrl_find_end; echo "${{HPCRL_END_TIME:-none}}"'
    assert bash(script, SLURM_JOB_ID="7", HPCRL_END_TIME="1", TZ="UTC").stdout.strip() == end
    failing = bash("squeue() { return 1; }; hpcrl_find_end; echo ${HPCRL_END_TIME:-none}", SLURM_JOB_ID="7")
    assert failing.stdout.strip() == "none"


def test_run_folder_follows_overrides() -> None:
    found = bash('hpcrl_run_dir "$@"', "runs/ppo", "actor.optim.lr=1", "run.name=a b", "run.dir=/x y")
    assert found.stdout == "/x y/a b\n"
    expanded = bash(
        'hpcrl_run_dir "$@"', "runs/ppo", "run.dir=${oc.env:WORK}/r", "run.name=$WHO", WORK="/x y", WHO="me"
    )
    assert expanded.stdout == "/x y/r/me\n"
    unset = bash('run=$(hpcrl_run_dir "$@") || exit; echo "$run"', "runs/ppo", "run.dir=$NO_SUCH/r")
    assert (unset.returncode, unset.stdout) == (2, "")
    assert unset.stderr == "hpcrl: error: found $NO_SUCH/r; expected NO_SUCH to be set\n"


class Site:
    """Commands of Slurm that answer from files and write down how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self.run.mkdir()
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.command("sleep", "")
        self.command("scontrol", f'[[ $1 != requeue ]] || echo "$@" >>{folder}/requeued')
        self.state("RUNNING None")
        self.srun(0)

    def command(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def state(self, text: str) -> None:
        self.command("squeue", f"echo {text}")

    def srun(self, code: int, said: int | None = None) -> None:
        """srun ends with `code`; the program wrote `said` into exit.json."""
        record = json.dumps({"code": said, "start": "$HPCRL_START"}, indent=1)
        write = f"cat >{self.run}/exit.json <<EOF\n{record}\nEOF\n" if said is not None else ""
        self.command("srun", f'{write}printf "%s\\n" "$@" >{self.folder}/srun\nexit {code}')

    def slice(self, **environ: str) -> subprocess.CompletedProcess[str]:
        """One slice of a job: code of the batch script."""
        script = "hpcrl_trap; hpcrl_python=(python3) hpcrl_srun_options=(); "
        script += 'hpcrl_srun "$1" train x.yaml "a b"; hpcrl_leave $?'
        given = {"PATH": f"{self.bin}:{os.environ['PATH']}", "SLURM_JOB_ID": "42"} | environ
        return bash(script, str(self.run), **given)

    @property
    def requeued(self) -> list[str]:
        path = self.folder / "requeued"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.parametrize(
    ("srun", "said", "code"), [(0, 0, 0), (137, 1, 1), (137, 86, 86), (0, None, 0), (137, None, 137), (143, 0, 0)]
)
def test_exit_json_is_the_truth(site: Site, srun: int, said: int | None, code: int) -> None:
    (site.run / "exit.json").write_text('{\n "code": 85,\n "start": "41.0"\n}\n')  # of an earlier slice
    site.srun(srun, said)
    assert site.slice().returncode == code
    assert site.requeued == []


@pytest.mark.parametrize(
    ("fails", "begins", "loses", "code", "starts"),
    [(1, False, False, 0, 2), (9, False, False, 134, 3), (9, True, False, 134, 1), (9, True, True, 134, 3)],
)
def test_a_start_of_mpi_that_fails_is_tried_again(
    site: Site, fails: int, begins: bool, loses: bool, code: int, starts: int
) -> None:
    """But nothing is that has begun and owns the run's folder: it was killed, and its job continues in another slice.
    One that has lost the folder to another job is not continued; its next try finds that job."""
    tries, owner = site.folder / "tries", site.run / "owner"
    owner.mkdir()
    (owner / "00000001.json").write_text('{\n "start": "41.0"\n}')  # of an earlier slice
    takes = f"echo ' \"start\": \"'$HPCRL_START'\",' >{owner}/00000002.json\n" if begins else ""
    takes += f'echo \' "start": "7.0",\' >{owner}/00000010.json\n' if loses else ""
    site.command("srun", f"{takes}echo >>{tries}\n(($(wc -l <{tries}) > {fails})) || exit 134")
    ended = site.slice()
    assert (ended.returncode, tries.read_text().count("\n")) == (code, starts)
    assert ended.stderr.count("MPI did not start on all ranks (srun's exit code 134): try") == starts - 1
    assert site.requeued == (["requeue 42"] if begins and not loses else [])


@pytest.mark.parametrize(
    ("codes", "steps", "most", "code", "starts", "line"),
    [
        (
            (137, 137, 0),
            (3, 4, 5),
            10,
            0,
            3,
            "a rank was killed in step 4 (srun's exit code 137); start 2 of at most 10",
        ),
        (
            (137, 137, 0),
            (3, 3, 3),
            10,
            137,
            2,
            "as before the last start; the ranks are not started again in this slice",
        ),
        ((137, 137, 0), (3, 4, 5), 1, 137, 2, "1 starts again in this slice are HPCRL_MAX_RELAUNCHES"),
        ((137, 137, 0), (3, 4, 5), 0, 137, 1, "asking for restart 1"),
        ((85,), (3,), 10, 85, 1, "asking for restart 1"),
    ],
)
def test_when_ranks_start_again_in_the_allocation(
    site: Site, codes: tuple[int, ...], steps: tuple[int, ...], most: int, code: int, starts: int, line: str
) -> None:
    """On one node, where a start owns the folder and is in a step when a rank is killed."""
    tries, owner = site.folder / "tries", site.run / "owner"
    owner.mkdir()
    requeue = f'echo "$@" >>{site.folder}/requeued'
    site.command("scontrol", f"case $1 in show) echo n0 ;; requeue) {requeue} ;; esac")
    site.command(
        "srun",
        f"""[[ $* == *hpcrl* ]] || exit 0 # whether the node answers
echo >>{tries}
number=$(wc -l <{tries}) codes=({" ".join(map(str, codes))}) steps=({" ".join(map(str, steps))})
echo ' "start": "'$HPCRL_START'",' >{owner}/0000000$number.json
echo '{{"step": '$((steps[number - 1] - 1))', "score": 0.0}}' >>{site.run}/metrics.jsonl
exit ${{codes[number - 1]}}""",
    )
    ended = site.slice(HPCRL_MAX_RELAUNCHES=str(most), SLURM_JOB_NODELIST="n0")
    assert (ended.returncode, tries.read_text().count("\n")) == (code, starts), ended.stderr
    assert line in ended.stderr
    assert site.requeued == (["requeue 42"] if code else [])


def test_a_planned_stop_is_requeued(site: Site) -> None:
    site.srun(137, 85)
    assert site.slice().returncode == 85
    assert site.requeued == ["requeue 42"]
    arguments = (site.folder / "srun").read_text().splitlines()
    assert {"--disable-status", "--kill-on-bad-exit=1", "--wait=60"} < set(arguments) and arguments[-1] == "a b"


@pytest.mark.parametrize(("srun", "said", "code"), [(85, 85, 85), (137, 130, 130), (137, None, 137)])
def test_ctrl_c_ends_the_script_without_another_slice(site: Site, srun: int, said: int | None, code: int) -> None:
    """Of `bash slurm/NAME.sbatch` in an allocation of salloc: the terminal interrupts the script as well as srun."""
    site.srun(srun, said)
    site.command("srun", f"kill -INT $PPID\n{(site.bin / 'srun').read_text()}")
    ended = site.slice()
    assert (ended.returncode, site.requeued) == (code, [])
    assert ("saved; start it again to go on" in ended.stderr) == (code == 85)


def test_an_array_element_requeues_itself_alone(site: Site) -> None:
    site.srun(85, 85)
    site.slice(SLURM_ARRAY_JOB_ID="42", SLURM_ARRAY_TASK_ID="7")
    assert site.requeued == ["requeue 42_7"]


@pytest.mark.parametrize(
    ("state", "environ", "requeued"),
    [
        ("RUNNING None", {"SLURM_RESTART_COUNT": "100"}, False),
        ("RUNNING None", {"SLURM_RESTART_COUNT": "3", "HPCRL_MAX_RESTARTS": "3"}, False),
        ("RUNNING None", {"SLURM_RESTART_COUNT": "2", "HPCRL_MAX_RESTARTS": "3"}, True),
        ("COMPLETING None", {}, False),  # scancel
        ("COMPLETING TimeLimit", {}, True),
        ("", {}, True),  # the controller does not answer
    ],
)
def test_what_is_not_requeued(site: Site, state: str, environ: dict[str, str], requeued: bool) -> None:
    site.srun(85, 85)
    site.state(state)
    assert site.slice(**environ).returncode == 85
    assert bool(site.requeued) == requeued


def test_a_dry_run_touches_no_run(site: Site) -> None:
    (site.run / "exit.json").write_text('{\n "code": 1\n}\n')
    assert site.slice(HPCRL_DRY_RUN="1").returncode == 0
    assert (site.run / "exit.json").exists()


@pytest.mark.parametrize(
    ("environ", "command"),
    [
        ({"HPCRL_VENV": "{venv}"}, "{venv}/bin/python3"),
        (
            {"HPCRL_IMAGE": "a.sif", "HPCRL_CONTAINER": "apptainer", "HPCRL_MOUNTS": "/d"},
            "apptainer exec --nv --pwd {here} --bind {here},/d a.sif python3",
        ),
        (
            {"HPCRL_IMAGE": "a", "HPCRL_CONTAINER": "pyxis"},
            "python3 --container-image=a --container-workdir={here} --container-mounts={here}:{here}",
        ),
        (
            {"HPCRL_IMAGE": "a.toml", "HPCRL_CONTAINER": "edf"},
            "env --chdir={here} python3 --environment=a.toml",
        ),
    ],
)
def test_how_python_starts(tmp_path: Path, environ: dict[str, str], command: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to("/usr/bin/env")
    environ = {name: value.format(venv=tmp_path) for name, value in environ.items()}
    found = bash('hpcrl_choose_python; echo "${hpcrl_python[@]}" "${hpcrl_srun_options[@]}"', **environ)
    assert found.stdout.strip() == command.format(venv=tmp_path, here=os.getcwd())


def test_a_container_on_amds_nodes_has_their_driver() -> None:
    assert bash("hpcrl_gpu_option /dev/null; hpcrl_gpu_option /nowhere").stdout.split() == ["--rocm", "--nv"]


@pytest.mark.parametrize(
    "environ",
    [
        {"HPCRL_IMAGE": "a", "HPCRL_CONTAINER": "docker"},
        {"HPCRL_VENV": "/nowhere"},
        {"HPCRL_IMAGE": "a", "PATH": "/bin"},
    ],
)
def test_without_python_a_job_ends_at_once(environ: dict[str, str]) -> None:
    found = bash("hpcrl_choose_python; echo went on", **environ)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("hpcrl: error: ") and found.stderr.count("\n") == 1
