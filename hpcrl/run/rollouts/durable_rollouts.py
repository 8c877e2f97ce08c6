"""How long finished responses are kept for a restart."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from hpcrl.engine.checkpoint.manifest import MANIFEST
from hpcrl.observe.record.archive import generation_logs
from hpcrl.sandbox.foreign_files import read_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DurableRollouts:
    """Lives on rank 0; the generation logs of all ranks in `folder` (hpcrl/observe/record/archive.py).

    A restart continues from checkpoint c and can use responses that the weights of c have drawn: those of step c + 1,
    and of the next `num_ahead` steps if generation is ahead of training. Logs of the current step are kept as well,
    because a planned stop in the middle of it saves the checkpoint before it.
    """

    folder: Path
    resumed_at: int  # steps done at the start, 0 without a checkpoint
    num_ahead: int = 0
    enabled: bool = True

    def resume(self) -> int | None:
        """Remove logs that this attempt cannot use. Returns the version of the weights whose responses it can use, or
        None."""
        self._keep(lambda step: self.enabled and self._is_after(step, self.resumed_at))
        return self.resumed_at if any(generation_logs(self.folder)) else None

    def step_ended(self, step: int, *, saved: int, perhaps: Collection[int | None] = ()) -> None:
        """Remove logs that a restart would not use. `saved`: step of the newest complete checkpoint, 0 without one.
        `perhaps`: of a checkpoint that is being written, which may still fail, and of the newest snapshot."""
        bases = [saved, *(base for base in perhaps if base is not None)]
        self._keep(lambda other: other > step or any(self._is_after(other, base) for base in bases))

    def run_ended(self) -> None:
        """Remove all logs, because all steps are done."""
        self._keep(lambda step: False)

    def _is_after(self, step: int, checkpoint: int) -> bool:
        return checkpoint < step <= checkpoint + 1 + self.num_ahead

    def _keep(self, is_needed: Callable[[int], bool]) -> None:
        for step, path in generation_logs(self.folder):
            if not is_needed(step):
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    log.warning("cannot remove %s: %s", path, error.strerror)


def bring_back(aside: Path, folder: Path) -> None:
    """Move generation logs back from a folder that was set aside: a run that starts anew has the same start weights."""
    for _, path in generation_logs(aside):
        folder.mkdir(exist_ok=True)
        path.rename(folder / path.name)


def origin_of(start_weights: Path | None) -> str:
    """A name for the weights in a checkpoint: their hash, because another job may have overwritten the folder."""
    manifest = start_weights / MANIFEST if start_weights is not None else None
    if manifest is None or not manifest.is_file():
        return str(start_weights)
    return blake2b(read_bytes(manifest), digest_size=16).hexdigest()
