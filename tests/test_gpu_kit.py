"""The scripts of tools/gpu: what they do with their arguments, and with checks that fail."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

KIT = Path(__file__).parents[1] / "tools" / "gpu"
SCRIPT = f"""
source {KIT}/common.sh
check "one that passes" 5 echo "pass: as expected"
check "a table" 5 printf '%s\\n' "| a | b |" "|---|---|" "| 1 | 2 |" "3 rows"
shown=2 check "one with its log" 5 printf '%s\\n' "first" "second" "third"
check "one that fails" 5 bash -c 'echo "from the log"; echo "fail: 1 found; expected 2"; exit 1'
check "one that crashes" 5 bash -c 'echo "pass: too early"; exit 3'
check "one that fails with code 0" 5 bash -c 'echo "fail: after all"'
check "one that is skipped" 5 bash -c 'echo "skip: no such chip"; exit 77'
budget=$((SECONDS + 6))
check "one that hangs" 5 sleep 60
check "one that has no time" 5 true
finish
"""
SAID = [
    "- **pass** one that passes: as expected",
    "- **pass** a table: 3 rows",
    "| a | b |",
    "|---|---|",
    "| 1 | 2 |",
    "- **pass** one with its log: third",
    "second",
    "third",
    "- **fail** one that fails: 1 found; expected 2",
    "from the log",
    "fail: 1 found; expected 2",
    "- **fail** one that crashes: ended with code 3",
    "pass: too early",
    "- **fail** one that fails with code 0: after all",
    "fail: after all",
    "- **skip** one that is skipped: no such chip",
    "- **fail** one that hangs: not ended after 6 s",
    "- **fail** one that has no time: not run: the time of all checks is used up",
    "3 passed, 5 failed, 1 skipped",
]


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(["bash", script, *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["experts", "exact", "correct", "speed", "job", "engines", "multi"])
@pytest.mark.parametrize("arguments", [["--rehearsal"], ["-o"], ["-o", "/no/such/folder/report.md"]])
def test_a_wrong_argument_is_one_line(name: str, arguments: list[str]) -> None:
    ended = run(KIT / f"{name}.sh", *arguments)
    assert ended.returncode == 2
    assert ended.stdout == "" and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith(f"{name}: error: ")
    assert arguments[-1] in ended.stderr


def test_without_a_gpu_only_a_rehearsal_runs(tmp_path: Path) -> None:
    ended = run(KIT / "correct.sh", "-o", str(tmp_path / "report.md"))
    assert ended.returncode == 2
    assert "torch finds no GPU; --rehearse" in ended.stderr
    assert (tmp_path / "report.md").read_text() == ""


def test_a_failed_check_is_reported_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "small.sh").write_text(SCRIPT)
    ended = run(tmp_path / "small.sh", "--rehearse", "-o", str(tmp_path / "report.md"))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    report = (tmp_path / "report.md").read_text()
    assert ended.stdout == report
    first, *rest = (line for line in report.splitlines() if line not in ("", "```"))
    assert first == "# hpcrl on a GPU: small"
    assert "no GPU: a rehearsal" in rest[0]
    assert [without_seconds(line) for line in rest[1:]] == SAID


def test_what_has_passed_is_not_run_again(tmp_path: Path) -> None:
    """In a second command with the same report, unless --again; what failed is."""
    report, ran = tmp_path / "report.md", tmp_path / "ran"
    (tmp_path / "note.sh").write_text(f'echo "$1" >>{ran}; printf "| a |\\n|---|\\n"; exit "$2"')
    checks = [f'check "{name}" 5 bash {tmp_path}/note.sh {name} {code}' for name, code in (("good", 0), ("bad", 1))]
    (tmp_path / "small.sh").write_text("\n".join([f"source {KIT}/common.sh", *checks, "finish"]))
    arguments = "--rehearse", "-o", str(report)
    first = run(tmp_path / "small.sh", *arguments)
    again = run(tmp_path / "small.sh", *arguments)
    assert first.returncode == again.returncode == 1
    assert ran.read_text().split() == ["good", "bad", "bad"]
    assert "passed before: good" in again.stdout
    outcomes = [line for line in report.read_text().splitlines() if line.startswith(("- **", "1 passed"))]
    assert [line.split(" (")[0].split(", in")[0] for line in outcomes] == [
        *("- **pass** good", "- **fail** bad", "1 passed, 1 failed, 0 skipped")
    ]
    assert report.read_text().count("\n| a |\n") == 3  # two tables, and the log of what failed
    run(tmp_path / "small.sh", *arguments, "--again")
    assert ran.read_text().split() == ["good", "bad", "bad", "good", "bad"]


@pytest.mark.parametrize(
    "name, part, head",
    [
        ("experts", "^grouped products", "| grouped product | rows | us |"),
        ("exact", "default workspaces", "| product | rows | same bits as at rows |"),
    ],
)
def test_a_part_runs_alone_in_a_rehearsal(name: str, part: str, head: str, tmp_path: Path) -> None:
    ended = run(KIT / f"{name}.sh", "--rehearse", "--only", part, "-o", str(tmp_path / "report.md"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = (tmp_path / "report.md").read_text()
    assert report.count("- **pass**") == 1 and "1 passed, 0 failed, 0 skipped" in report
    assert head in report


PRIVATE = """
on n17 and n18.cluster.edu (ranks 0-3), 10.1.2.3 (hsn0), fe80::1ff:fe23:4567:890a, at 12:30:45, of abc-12
  File "/home/me/hpcrl/model/a.py", line 3; PATH=/usr/bin:/opt/x/y; `/a/b`; file:///scratch/p/run
torch 2.11.0, 3.6 GB/s and/or TP1 / PP2: see https://docs.rs/a/b
"""
SENT = """
on NODE0 and NODE1 (ranks 0-3), ADDRESS (hsn0), ADDRESS, at 12:30:45, of NAME
  File ".../a.py", line 3; PATH=.../bin:.../y; `.../b`; .../run
torch 2.11.0, 3.6 GB/s and/or TP1 / PP2: see https://docs.rs/a/b
"""


def test_a_report_to_send_has_no_names_addresses_and_paths(tmp_path: Path) -> None:
    script = f"source {KIT}/report.sh\nprivate_names=$(SLURM_JOB_ACCOUNT=abc-12 removed_names n17.cluster.edu n18)\n"
    (tmp_path / "small.sh").write_text(f"{script}private <<'END'{PRIVATE}END\n")
    assert "\n" + run(tmp_path / "small.sh", "-o", str(tmp_path / "report.md")).stdout == SENT


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_the_kit_for_several_gpus_rehearses_with_mpiexec(tmp_path: Path) -> None:
    ended = run(KIT / "multi.sh", "--rehearse", "-o", str(tmp_path / "report.md"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = (tmp_path / "report.md").read_text()
    assert "9 passed, 0 failed, 0 skipped" in report
    assert not [name for name in (platform.node(), str(Path.cwd()), str(tmp_path)) if name in report]
    assert list(tmp_path.iterdir()) == [tmp_path / "report.md"]


def without_seconds(line: str) -> str:
    """`- **pass** title (3 s): detail` as `- **pass** title: detail`, and the last line without its time."""
    head, _, tail = line.partition(" (")
    return f"{head}{tail[tail.index(')') + 1 :]}" if line.startswith("- ") and tail else line.partition(", in ")[0]
