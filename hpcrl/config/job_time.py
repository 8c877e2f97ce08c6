"""What an allocation costs: arithmetic of `job:`."""

from __future__ import annotations

from hpcrl.config.schema import JobConfig


def seconds(time: str) -> int:
    """Of [D-]HH:MM:SS."""
    days, _, clock = time.rpartition("-")
    hours, minutes, rest = map(int, clock.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest


def node_hours(job: JobConfig) -> float:
    """At most: of the first slice, if it lasts to its end."""
    return job.nodes * seconds(job.time) / 3600
