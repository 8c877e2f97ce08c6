"""Resolve hpcrl's requirements for this interpreter: name==version lines on stdout, what pip downloads on stderr.

    .venv/bin/python tools/resolve.py cpu,test >pinned.txt
    python3 tools/resolve.py --requirements gpu,wandb >requirements.in      only setup.py's; "" for those of hpcrl only

A torch that is installed stays where setup.py's range admits it. Without a GPU, a CPU build that pip can see (a wheel
among PIP_FIND_LINKS, PyTorch's CPU index) is preferred to PyPI's, which brings CUDA. triton is the one that torch asks
for; a CPU build asks for none and gets the one that PyPI's torch of the same version asks for.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import ssl
import subprocess
import sys
import types
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TIMEOUT = 10.0  # seconds for the size of a file


def main(extras: str) -> None:
    torch = chosen_torch()
    constraints = [torch] if torch else []
    found = torch_metadata(torch or torch_range())
    if found is not None and not any(each.startswith("triton") for each in found.get("requires_dist", [])):
        constraints += triton_of(found["version"].partition("+")[0])
    packages = [each for each in resolve(f"{ROOT}[{extras}]", constraints) if each["metadata"]["name"] != "hpcrl"]
    say(packages)
    print("\n".join(f"{each['metadata']['name']}=={each['metadata']['version']}" for each in packages))


def requirements(extras: str) -> None:
    """Print setup.py's requirements of hpcrl and of extras, one a line, for tools that may not build a package."""
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
        print(f"resolve: error: setup.py has no extra {unknown[0]!r}; it has {', '.join(known)}", file=sys.stderr)
        sys.exit(2)
    listed = [*about["install_requires"], *(line for extra in extras.split(",") for line in known[extra])]
    print("\n".join(dict.fromkeys(listed)))


def torch_range() -> str:
    """setup.py's requirement of the native engine."""
    found = re.search(r'"(torch>=[^"]*)"', (ROOT / "setup.py").read_text())
    assert found, "setup.py names no range of torch"
    return found[1]


def chosen_torch() -> str | None:
    """The newest CPU build that pip can see, on a machine without a GPU and without an installed torch."""
    if shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists() or installed("torch"):
        return None
    least, bound = re.findall(r"[\d.]+", torch_range())
    listed = subprocess.run([*PIP, "index", "versions", "torch"], capture_output=True, text=True).stdout
    builds = [version for version in re.findall(r"[\d.]+\+cpu", listed) if key(least) <= key(version) < key(bound)]
    return f"torch=={max(builds, key=key)}" if builds else None


def key(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.partition("+")[0].split(".")))


def installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def torch_metadata(requirement: str) -> dict[str, Any] | None:
    """Of the torch that is installed, or that pip would take."""
    if installed("torch"):
        return {"version": metadata.version("torch"), "requires_dist": metadata.requires("torch") or []}
    taken = resolve(requirement, ["--no-deps"])
    return taken[0]["metadata"] if taken else None


def triton_of(version: str) -> list[str]:
    """The triton that PyPI's torch of this version requires, such as triton==3.7.1; empty where it requires none."""
    taken = resolve(f"torch==={version}", ["--no-deps", "--ignore-installed"])  # === leaves local versions out
    wanted = (each.partition(";")[0] for each in taken[0]["metadata"].get("requires_dist", []))
    return [each.strip() for each in wanted if each.startswith("triton")]


def resolve(requirement: str, more: list[str]) -> list[dict[str, Any]]:
    """What pip would install, as its report describes it."""
    command = [*PIP, "install", "--dry-run", "-qq", "--report", "-", requirement, *more]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return json.loads(done.stdout)["install"]


def say(packages: list[dict[str, Any]]) -> None:
    """Print how many packages pip downloads, their bytes, and the largest."""
    urls = {each["metadata"]["name"]: each["download_info"]["url"] for each in packages}
    with ThreadPoolExecutor(16) as pool:
        sizes = dict(zip(urls, pool.map(size, urls.values()), strict=True))
    if not urls:
        return
    large = sorted(((nbytes, name) for name, nbytes in sizes.items() if nbytes >= 20e6), reverse=True)
    named = ", ".join(f"{name} {nbytes / 1e6:.0f}" for nbytes, name in large[:8])
    unknown = sum(not nbytes for nbytes in sizes.values())
    total = f"{sum(sizes.values()) / 1e6:,.0f} MB" + (f" and {unknown} of unknown size" if unknown else "")
    print(f"environment: {len(urls)} packages, {total} (MB: {named}, ...)", file=sys.stderr)
    if "nvidia-cudnn-cu13" in urls:
        hint = "PyPI's torch brings CUDA; for a CPU build: PIP_EXTRA_INDEX_URL=<PyTorch's CPU index> (see pytorch.org)"
        print(f"environment: {hint}", file=sys.stderr)


def size(url: str) -> int:
    """Bytes of a file; 0 where they cannot be found out."""
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    try:
        request = urllib.request.Request(url, method="GET" if url.startswith("file:") else "HEAD")
        with urllib.request.urlopen(request, timeout=TIMEOUT, context=context) as answer:
            return int(answer.headers.get("Content-Length") or 0)
    except OSError:
        return 0


PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")

if __name__ == "__main__":
    if sys.argv[1] == "--requirements":
        requirements(sys.argv[2])
    else:
        main(sys.argv[1])
