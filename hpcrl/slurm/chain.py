"""What `hpcrl submit` submitted, for `hpcrl status`: `chain.json` in the folder of each run of the chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcrl.sandbox.new_files import read_json, replace_json

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

    def job_of(self, number: int) -> str:
        """Slurm's id of a run, by its place in `runs`: in an array, that of its element."""
        is_array = len(self.runs) > 1 or self.runs[0] != self.folder
        return f"{self.job}_{number}" if is_array else self.job


def write(links: Sequence[Link]) -> None:
    """Write the chain into the folders of all its runs; an earlier chain of these runs is replaced."""
    for folder in {Path(folder) for link in links for folder in (*link.runs, link.folder)}:
        replace_json(folder / CHAIN_FILE, {"links": [asdict(link) for link in links]})


def read(folder: Path) -> list[Link] | None:
    """The chain that the run was submitted in; None if it was not submitted, or the file is damaged."""
    try:
        links = read_json(folder / CHAIN_FILE, {})["links"]
        found = [Link(**{**link, "runs": tuple(link["runs"])}) for link in links]
    except (KeyError, TypeError):
        return None
    texts = [text for link in found for text in (link.command, link.job, link.folder, *link.runs)]
    return found if all(isinstance(text, str) and "\0" not in text for text in texts) else None
