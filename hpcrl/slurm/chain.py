"""Jobs in a row, such as SFT, reward model, RL: each starts once the one before it has ended well."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from hpcrl.runtime.exits import InputError


def command(script: Path, after: str | None) -> list[str]:
    """The sbatch line. A job that was requeued has not ended; one that failed takes those after it off the queue."""
    dependency = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
    return ["sbatch", "--parsable", *dependency, str(script)]


def submit(scripts: Sequence[Path]) -> list[str]:
    """Submit each script from its own folder; job ids. When one is refused, those before it are cancelled."""
    ids: list[str] = []
    for script in scripts:
        line = command(script, ids[-1] if ids else None)
        try:
            answer = subprocess.run(line, cwd=script.parent, capture_output=True, text=True)
        except FileNotFoundError:
            raise InputError("no sbatch here; run submit where jobs are submitted, or use --dry-run") from None
        if answer.returncode:
            if ids:
                subprocess.run(["scancel", *ids], capture_output=True)
            said = " ".join(answer.stderr.split())
            raise InputError(f"sbatch refused {script}: {said}{'; the jobs before it are cancelled' if ids else ''}")
        ids.append(answer.stdout.strip().split(";")[0])
    return ids
