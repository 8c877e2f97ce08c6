"""Names of files, folders and commands for others: without the folders of this machine and without its users."""

from __future__ import annotations

import pwd
import re
from collections.abc import Iterable
from pathlib import PurePath

HOMES = ("home", "Users", "users")  # folders of users' folders
NAMELESS = ("checkpoints", "huggingface", "snapshots", "/", "..", ".", "~")  # components that do not name a model
PATH = re.compile(r"[^\s,'\"\[\]{}=:]*/[^\s,'\"\[\]{}=:]*")
WHERE = re.compile(r"(?:placement|job|run\.dir)[.=]")  # overrides that say where a run ran


def public_name(path: str) -> str:
    """The model or dataset of a path in the Hugging Face cache; of another path its last two components that name
    something, without names of users."""
    parts = PurePath(path).parts
    for part in reversed(parts):
        if part.startswith(("models--", "datasets--")):
            return part.split("--", 1)[1].replace("--", "/")
    staged = next((place + 2 for place in range(len(parts) - 1) if is_bundle(*parts[place : place + 2])), 0)
    private = max((place + 2 for place, part in enumerate(parts) if part in HOMES), default=0)
    named = [part for part in parts[max(staged, private) :] if part not in NAMELESS]
    return "/".join([*(part for part in named[-2:-1] if not is_user(part)), *named[-1:]])


def is_bundle(folder: str, inside: str) -> bool:
    """Whether what follows is a path of its own, below the bundle of a submitted job."""
    return folder.startswith("bundle_") and inside == "inputs"


def is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name.removeprefix("~"))
    except KeyError:
        return False
    return True


def public_command(words: Iterable[str]) -> list[str]:
    """The words of a command with public names in place of paths, and without overrides that say where it ran."""
    return [PATH.sub(lambda found: public_name(found[0]), word) for word in words if not WHERE.match(word)]
