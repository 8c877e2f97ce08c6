"""Runs the commands of a page in full: `python tools/run_page.py docs/tutorial.md [--folder DIR]`.

They run in order, as typed into one terminal, in a new clone of this checkout and with a home directory of their own:
all blocks with the comments `runs`, `runs in full` and `file` (tests/docs/pages.py), up to the first error.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checkout import ROOT

from tests.docs.pages import blocks_of

KEPT = ("LANG", "PATH", "TERM", "SSL_CERT_FILE")  # and PIP_*: how this machine reaches a package index


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("page", type=Path)
    parser.add_argument("--folder", type=Path, help="absent or empty; by default a temporary one, which is kept")
    args = parser.parse_args()
    folder: Path = (args.folder or Path(tempfile.mkdtemp(prefix="hpcrl_page_"))).resolve()
    (folder / "home").mkdir(parents=True)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "hpcrl")], check=True)
    lines = ["set -euo pipefail"]
    for block in blocks_of(args.page):
        if block.file:
            lines.append(
                f"mkdir -p $(dirname {block.file})\ncat > {block.file} <<'END_OF_FILE'\n{block.text}END_OF_FILE"
            )
        elif block.runs_in_full and block.language == "bash":
            lines += [f"echo '== {args.page}:{block.line}, after '$SECONDS' s'", block.text]
    script = folder / "page.sh"
    script.write_text("\n".join([*lines, f"echo '== {args.page} ends after '$SECONDS' s, in {folder}'", ""]))
    variables = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith("PIP_")}
    environment = variables | {"HOME": str(folder / "home")}
    return subprocess.run(["bash", script], cwd=folder / "hpcrl", env=environment, stdin=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    sys.exit(main())
