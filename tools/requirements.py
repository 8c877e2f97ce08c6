"""Print the requirements of setup.py, one a line: those of hpcrl and of extras. Standard library only.

    python3 tools/requirements.py gpu,wandb >requirements.in      "" for those of hpcrl only

For tools that may not build a package to read its metadata.
"""

from __future__ import annotations

import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def main(extras: str) -> None:
    about: dict[str, Any] = {}
    setuptools: Any = types.ModuleType("setuptools")
    setuptools.setup = about.update
    setuptools.find_packages = lambda **_: []
    setuptools.build_py = object
    sys.modules["setuptools"] = sys.modules["setuptools.command.build_py"] = setuptools
    os.chdir(ROOT)
    runpy.run_path("setup.py")
    known = about["extras_require"] | {"": []}
    if unknown := [extra for extra in extras.split(",") if extra not in known]:
        print(f"requirements: error: setup.py has no extra {unknown[0]!r}; it has {', '.join(known)}", file=sys.stderr)
        sys.exit(2)
    listed = [*about["install_requires"], *(line for extra in extras.split(",") for line in known[extra])]
    print("\n".join(dict.fromkeys(listed)))


if __name__ == "__main__":
    main(sys.argv[1])
