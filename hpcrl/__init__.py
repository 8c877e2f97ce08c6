"""Reinforcement-learning post-training of language models as one SPMD MPI program. The import is light."""

import os

if not os.path.isdir(os.path.join(os.path.dirname(__file__), "kernels")):
    # a checkout in which setup.py has not run, as beside an installed wheel: hpcrl.kernels stands beside this folder
    __path__.append(os.path.dirname(os.path.dirname(__file__)))

from hpcrl import moved as moved  # noqa: E402  # what has an old name is said to have moved


def __getattr__(name: str) -> str:
    """`__version__`, of the installed package: setup.py has it."""
    if name != "__version__":
        raise AttributeError(f"module 'hpcrl' has no attribute {name!r}")
    from hpcrl.runtime.launcher import version_of

    return version_of("hpcrl") or "0+unknown"  # a source folder that is not installed


def __dir__() -> list[str]:
    return [*globals(), "__version__"]
