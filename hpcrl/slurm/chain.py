"""What `hpcrl submit` submitted, for `hpcrl status`: `chain.json` in the folder of each run of the chain."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

CHAIN_FILE = "chain.json"


@dataclass(frozen=True)
class Link:
    """One job of a chain. runs: folders of its runs, one for each element of an array. folder: of its script."""

    command: str
    nodes: int
    ntasks_per_node: int
    job: str  # Slurm's id
    runs: tuple[str, ...]
    folder: str


def write(links: Sequence[Link]) -> None:
    """Write the chain into the folders of all its runs; an earlier chain of these runs is replaced."""
    text = json.dumps({"links": [asdict(link) for link in links]}, indent=1) + "\n"
    for folder in {Path(folder) for link in links for folder in (*link.runs, link.folder)}:
        draft = folder / f"{CHAIN_FILE}.tmp"
        draft.write_text(text, encoding="utf-8")
        draft.replace(folder / CHAIN_FILE)


def read(folder: Path) -> list[Link] | None:
    """The chain that the run was submitted in; None if it was not submitted, or the file is damaged."""
    try:
        found = json.loads((folder / CHAIN_FILE).read_text(encoding="utf-8"))
        return [Link(**{**link, "runs": tuple(link["runs"])}) for link in found["links"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
