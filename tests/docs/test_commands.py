"""What the pages tell people to type does what they say, where a CPU is enough."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import IDS, PAGES, ROOT, Block, blocks_of, expand
from tests.preloaded import RANK
from tests.runtime.conftest import MPIEXEC, environment

LINKS = ("configs", "docs", "slurm", "tests", "tools")
JOBS = ("train", "sft", "rm", "preference", "online_dpo", "generate", "evaluate", "score", "convert")
RUNNING = [page for page in PAGES if any(block.runs for block in blocks_of(page))]
RARELY = ("from_trl.md",)  # test_pages.py checks its template


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_each_block_says_whether_it_runs(page: Path) -> None:
    unmarked = [
        block.line
        for block in blocks_of(page)
        if block.language in ("bash", "python")
        if not (block.runs_in_full or block.file or block.mark.startswith("not run: "))
    ]
    assert not unmarked, f"{page.name}: blocks at lines {unmarked} have no comment, see tests/docs/pages.py"


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.exhaustive] if page.name in RARELY else []
        )
        for page in RUNNING
    ],
)
def test_commands(page: Path, tmp_path: Path) -> None:
    for name in LINKS:
        (tmp_path / name).symlink_to(ROOT / name)
    make_environment(tmp_path / ".venv" / "bin")
    folder = tmp_path
    for block in blocks_of(page):
        if block.file:
            (folder / block.file).parent.mkdir(exist_ok=True)
            (folder / block.file).write_text(block.text)
        elif block.runs:
            folder = run(block, tmp_path, folder)
    assert undocumented(tmp_path) == []


def undocumented(folder: Path) -> list[str]:
    """Metrics of the runs in a folder that docs/reference/metrics.md does not have."""
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    spans = [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]
    documented = [re.compile(re.sub(r"<\w+>", ".+", name)) for span in spans for name in expand(span)]
    lines = [line for path in folder.glob("**/runs/*/metrics.jsonl") for line in path.read_text().splitlines()]
    logged = sorted({key for line in lines for key in json.loads(line)})
    return [key for key in logged if not any(name.fullmatch(key) for name in documented)]


def make_environment(folder: Path) -> None:
    """What `source .venv/bin/activate` leads to: jobs get $OVERRIDES, and Python starts as tests/preloaded has it."""
    folder.mkdir(parents=True)
    rank, jobs = shlex.join(RANK), "|".join(f"hpcrl/{job}" for job in JOBS)
    programs = {
        "python": f'case "$2/$3" in {jobs}) set -- "$@" $OVERRIDES;; esac\nexec {rank} "$@"',
        "hpcrl": 'exec python -m hpcrl "$@"',
        "mpiexec": f'exec {MPIEXEC} "$@"',
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "activate").write_text(f"export PATH={folder}:{Path(sys.executable).parent}:$PATH\n")


def run(block: Block, root: Path, folder: Path) -> Path:
    """Run a block in `folder` with the environment in `root`; the folder in which its commands end. Fails with their
    output when any of them fails."""
    if block.language == "python":
        (folder / "block.py").write_text(block.text)
    commands = block.text if block.language == "bash" else "python block.py\n"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"source {root}/.venv/bin/activate\n{commands}pwd > {root}/.folder"],
        cwd=folder,
        env=environment(OVERRIDES=block.overrides),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    output = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, f"the block at line {block.line} ended with {done.returncode}:\n{output}"
    return Path((root / ".folder").read_text().strip())
