"""The pages build, lead nowhere that is not there, and say what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from hpcrl.cli import load_job
from hpcrl.config.loader import load_config
from hpcrl.config.schema import Section
from hpcrl.config.verl_keys import entry_of
from hpcrl.jobs.train import Train
from tests.docs.pages import IDS, PAGES, ROOT, Block, blocks_of

LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
SCHEMA = Train.schema()  # with the sections of all jobs
KEY = re.compile(rf"(?<![\w./<-])(?:{'|'.join(SCHEMA.model_fields)})(?!\.(?:yaml|py)\b)(?:\.[a-z_]\w*)+(?![\w(*{{])")
TEMPLATES = [(page, block) for page in PAGES for block in blocks_of(page) if block.job]
OTHER_TOOLS = [page for page in PAGES if page.name.startswith("from_") and page.name != "from_verl.md"]
METHODS = {
    name
    for path in (ROOT / "hpcrl" / "workers").glob("*.py")
    for name in re.findall(r"^    def ([a-z]\w*)\(", path.read_text(encoding="utf-8"), re.M)
}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


def test_pages_build_strictly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", ".mkdocs.yml", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").exists()


def test_the_config_reference_is_the_schema() -> None:
    tool = str(ROOT / "tools" / "config_reference.py")
    done = subprocess.run([sys.executable, tool, "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_keys_exist(page: Path) -> None:
    """Keys of job templates in inline code: `actor.optim.lr=2e-6`, but not methods of roles: `actor.update_actor`."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    names = {name for span in re.findall(r"`([^`]+)`", text) for name in KEY.findall(span)}
    if page.name == "from_verl.md":
        names = {name for name in names if entry_of(name)[0] is None}
    missing = [name for name in sorted(names) if not is_key(name.split(".")) and name.split(".")[1] not in METHODS]
    assert not missing, f"{page.name} names keys that do not exist"


@pytest.mark.parametrize("page", OTHER_TOOLS, ids=[page.name for page in OTHER_TOOLS])
def test_tables_of_keys_name_whole_keys(page: Path) -> None:
    """`actor.optim.lr`, which `test_keys_exist` finds, and not `optim.lr`; or that there is none."""
    table = page.read_text(encoding="utf-8").partition("## Keys")[2].partition("\n## ")[0]
    cells = [re.split(r"(?<!\\)\|", line)[2] for line in table.splitlines() if line.startswith("| `")]
    assert len(cells) > 15
    for cell in cells:
        spans = re.findall(r"`([^`]+)`", cell)
        assert any(KEY.match(span) for span in spans) or "hpcrl " in cell or cell.startswith((" none", " no key")), cell


@pytest.mark.parametrize(("page", "block"), TEMPLATES, ids=[f"{page.name}:{it.file}" for page, it in TEMPLATES])
def test_templates_are_accepted(page: Path, block: Block, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(block.text)
    job = load_job(str(block.job))
    config = load_config(tmp_path / "job.yaml", schema=job.schema())
    job.check(config, config.job.nodes * config.job.ntasks_per_node)


def test_the_loop_is_that_of_train() -> None:
    """Logging, critic warm-up and PF-PPO, whose batch is `train_batch`, are left out."""
    source = (
        (ROOT / "hpcrl" / "jobs" / "train.py")
        .read_text(encoding="utf-8")
        .replace("(train_batch)", "(batch)")
        .replace(": Any", "")
    )
    lines = {line.split("  #")[0].strip() for line in source.splitlines()}
    shown = [block for page in PAGES for block in blocks_of(page) if block.text.startswith("for step in run.steps")]
    assert len(shown) == 2
    for block in shown:
        assert [line for line in block.text.splitlines() if line.split("  #")[0].strip() not in lines] == []


def test_links_of_the_readme_exist() -> None:
    links = LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def is_key(parts: list[str], section: type[Section] = SCHEMA) -> bool:
    field = section.model_fields.get(parts[0])
    if field is None:
        return False
    inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
    sections = [kind for kind in inner if issubclass(kind, Section)]
    return len(parts) == 1 or any(is_key(parts[1:], kind) for kind in sections)
