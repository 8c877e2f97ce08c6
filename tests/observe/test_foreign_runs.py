"""Folders of other people's runs whose files are links to this user's, or pipes: nothing of them is in the page."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.observe.read.attempts import event_files
from hpcrl.observe.read.logs import log_files
from hpcrl.observe.read.recorded_run import read_recorded_run
from hpcrl.observe.read.samples import recorded_steps
from hpcrl.observe.report.page import json_in_html, page_data, render
from tests.observe.stories import NODES, write_run_with_kills, write_samples
from tests.observe.written_runs import metrics, write_config, write_metrics

OF_THE_PRIVATE_RUN = ("maths", "words", "metrics of rank 1", "# Hang", "no progress for 612 s", *NODES)


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run_with_kills(tmp_path_factory.mktemp("home") / "private")
    write_samples(run, range(1, 4))
    page = json_in_html(page_data([read_recorded_run(run)]))
    assert all(text in page for text in OF_THE_PRIVATE_RUN)  # what must not be in the other pages
    return run


def of_links(private: Path, folder: Path, is_deep: bool) -> Path:
    """A run whose files, or whose files and folders directly in it, are links to those of another one."""
    folder.mkdir()
    for path in sorted(private.rglob("*") if is_deep else private.iterdir()):
        target = folder / path.relative_to(private)
        if is_deep and path.is_dir():
            target.mkdir()
        else:
            target.symlink_to(path)
    return folder


def report(run: Path) -> tuple[str, str]:
    """Page and messages of the command."""
    out = run.parent / "report.html"
    command = [sys.executable, "-m", "hpcrl", "report", str(run), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return out.read_text(), done.stderr


@pytest.mark.parametrize("is_deep", [True, False])
def test_links_to_private_files_are_not_followed(private: Path, tmp_path: Path, is_deep: bool) -> None:
    run = of_links(private, tmp_path / "theirs", is_deep)
    page, messages = report(run)
    data = page.partition('id="data">')[2].partition("</script>")[0]
    for text in (*OF_THE_PRIVATE_RUN, str(private)):
        assert text not in data and text not in messages
    found = read_recorded_run(run)
    assert not (found.config or found.log.rows or found.hangs or found.warnings or found.stragglers)
    assert not any(saved.gib for saved in found.checkpoints)
    assert [(run.outcome, run.first_step) for run in found.attempts if run.first_step is not None] == []
    named = ("logs", "verdict.md") if not is_deep else ("verdict.md", "config.yaml")
    for name in named:
        assert any(line.startswith(f"{name}: a link that leads out") for line in found.notes), found.notes
    assert recorded_steps(run) == ([1, 2, 3] if is_deep else [])
    assert is_deep or not (log_files(run) or event_files(run) or found.attempts)  # names of files tell something, too


def test_one_link_leaves_the_rest_of_the_page(private: Path, tmp_path: Path) -> None:
    run = tmp_path / "theirs"
    shutil.copytree(private, run)
    (run / "verdict.md").unlink()
    (run / "verdict.md").symlink_to(private / "logs" / "rank_00001.log")
    (run / "rollouts" / "step_00000002.h5").unlink()
    (run / "rollouts" / "step_00000002.h5").symlink_to(private / "rollouts" / "step_00000001.h5")
    data = page_data([read_recorded_run(run)])["runs"][0]
    assert data["hangs"] == [] and {sample["step"] for sample in data["samples"]["samples"]} == {1, 3}
    assert (
        sum(note.startswith(("verdict.md: a link", "rollouts/step_00000002.h5: a link")) for note in data["notes"]) == 2
    )
    assert len(data["attempts"]) == 4


def test_pipes_do_not_block(private: Path, tmp_path: Path) -> None:
    run = tmp_path / "pipes"
    for path in private.rglob("*"):
        target = run / path.relative_to(private)
        if path.is_dir():
            target.mkdir(parents=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.mkfifo(target)
    page, _ = report(run)
    assert "verdict.md: a pipe; it was not read" in page
    for command in (["status"], ["samples"], ["scalars"]):
        done = subprocess.run(
            [sys.executable, "-m", "hpcrl", *command, str(run)], capture_output=True, text=True, timeout=60
        )
        assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 3, done.stderr


def test_aliases_in_a_recorded_config(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_config(run)
    write_metrics(run, [metrics(1, random.Random(0))])
    bomb = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9) if n else 1}]\n" for n in range(11))
    for text in (bomb, "a: " + "[" * 200_000, "a: &a [*a]"):
        (run / "config.yaml").write_text(text)
        found = read_recorded_run(run)
        assert found.config == {} and "config.yaml: missing or damaged" in found.notes


CHARACTERS = "\u202e\u2066\x9b\x85\u200b\ufeff\xad\U000e0041\u061c"


def test_characters_that_reorder_text_are_escaped() -> None:
    data = {"text": f"a{CHARACTERS}b\u200d\u00e9\u4e2d</script>\U0001f600", CHARACTERS: "\ud83d"}
    page = render(data, f"run {CHARACTERS}")
    text = page.decode()
    assert not any(character in text.partition("uPlot")[0] + json_in_html(data) for character in CHARACTERS)
    assert json.loads(json_in_html(data)) == data
    assert "\u200d\u00e9\u4e2d" in json_in_html(data) and "</script>" not in json_in_html(data)
