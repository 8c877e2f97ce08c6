"""The pages that people read, and the blocks of code in them.

A comment in front of a block says what tests/docs/test_commands.py does with it; bash and Python need one:

    <!-- runs -->                        runs it; the blocks of a page share a folder, in order
    <!-- runs: trainer.save_freq=1 -->   the same, with overrides for each job in it, which make it small
    <!-- file: data/rows.jsonl -->       writes it to this file of the folder
    <!-- template: sft mine.yaml -->     the same; it is a template of `hpcrl sft`, which test_pages.py checks, too
    <!-- not run: needs GPUs -->         leaves it out
    <!-- runs in full: a download -->    leaves it out; tools/run_page.py, which has no overrides, runs it
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
BLOCK = re.compile(r"^(?:<!-- (?P<mark>[^\n]*) -->\n+)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    mark: str
    line: int

    @property
    def runs(self) -> bool:
        return self.mark == "runs" or self.mark.startswith("runs: ")

    @property
    def runs_in_full(self) -> bool:
        return self.runs or self.mark.startswith("runs in full: ")

    @property
    def job(self) -> str | None:
        """The job that a template is for."""
        kind, _, rest = self.mark.partition(": ")
        return rest.split()[0] if kind == "template" else None

    @property
    def file(self) -> str | None:
        """The file that a block is written to."""
        return self.mark.split()[-1] if self.mark.startswith(("file: ", "template: ")) else None

    @property
    def overrides(self) -> str:
        return self.mark.removeprefix("runs").removeprefix(": ")


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(found["language"], found["text"], found["mark"] or "", text.count("\n", 0, found.start()) + 1)
        for found in BLOCK.finditer(text)
    ]


def expand(text: str) -> list[str]:
    """`a/{b,c}` as a/b and a/c."""
    parts = re.split(r"\{([^{}]*)\}", text)
    options = [part.split(",") if index % 2 else [part] for index, part in enumerate(parts)]
    return ["".join(choice) for choice in itertools.product(*options)]
