"""Members of jobs under the names that they had before December 2026, in job files of users; for one release.

Where a job's class overrides `validate`, for example, it gets a subclass of its `validation_class` whose `run` is that
method, and a line for the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

# part -> former name of a member of a job -> its name in the part
FORMER = {
    "report": {name: name for name in ("label", "progress", "step_metrics", "phases_per_token", "is_predicted")},
    "validation": {"validates_first": "first", "validation_freq": "freq", "validate": "run"},
    "models": {name: name for name in ("needs_start_weights", "stands_for", "own_shapes")}
    | {"saved_roles": "saved", "loaded_roles": "loaded", "export_roles": "exported"}
    | {"frozen_weights": "frozen", "optim_of": "optimizer"},
    "saved_state": {"continue_from": "set_start", "position": "position", "state": "save", "load_state": "load"},
}
ATTRIBUTES = {"report": ("predicted", "peak_flops"), "validation": ("validator",)}  # set by the parts of built-in jobs


class FormerMember:
    """A member of a job under its former name: the part's, below what the job's class overrides."""

    def __init__(self, part: str, name: str) -> None:
        self.part, self.name = part, name

    def __get__(self, job: Any, owner: type) -> Any:
        if job is None:
            member = getattr(getattr(owner, f"{self.part}_class"), self.name)
            of_job = lambda job, *args, **options: self.__get__(job, owner)(*args, **options)  # noqa: E731
            return of_job if callable(member) else member
        part = getattr(job, self.part)
        adapters = [base for base in type(part).__mro__ if "is_adapter" in base.__dict__]
        return getattr(super(adapters[-1], part) if adapters else part, self.name)


class FormerMembers:
    """Lets a class of jobs override members under their former names: its parts return those of the job."""

    former_members: Sequence[str] = ()  # a line of the log for each
    phases_from_update: Sequence[str] = ("step",)  # not read any more

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        lines = []
        for part, members in FORMER.items():
            overridden = {old: new for old, new in members.items() if old in cls.__dict__}
            if overridden:
                base = getattr(cls, f"{part}_class")
                getters = {new: property(attrgetter(f"job.{old}")) for old, new in overridden.items()}
                setattr(cls, f"{part}_class", type(base.__name__, (base,), {**getters, "is_adapter": True}))
            lines += [f"{cls.__name__}.{old} is now `{new}` of its {part}_class" for old, new in overridden.items()]
        if "phases_from_update" in cls.__dict__:
            lines.append(f"{cls.__name__}.phases_from_update is now what its loop names in run.stops_before(...)")
        cls.former_members = (*cls.former_members, *lines)


def _attribute(path: str) -> property:
    part, _, name = path.partition(".")
    return property(attrgetter(path), lambda job, value: setattr(getattr(job, part), name, value))


for _part, _members in FORMER.items():
    for _former, _name in _members.items():
        setattr(FormerMembers, _former, FormerMember(_part, _name))
    for _name in ATTRIBUTES.get(_part, ()):
        setattr(FormerMembers, _name, _attribute(f"{_part}.{_name}"))
