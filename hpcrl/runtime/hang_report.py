"""What a hang is blamed on: pure functions over the last records of all ranks, and the text of `verdict.md`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from hpcrl.runtime.rank_status import Heartbeat, Sighting

LONGEST_STACKS = 20_000  # characters of one rank's stacks in the verdict


@dataclass(frozen=True)
class Verdict:
    """culprits: their ranks, never empty. why: what they have in common, in words. is_clear: false where only some of
    them are to blame, and the records do not say which."""

    sightings: tuple[Sighting, ...]
    culprits: tuple[int, ...]
    why: str
    is_clear: bool = True

    @property
    def first(self) -> Heartbeat | None:
        """The record of the first culprit."""
        return self._of(self.culprits)[0].record

    @property
    def sentence(self) -> str:
        blamed = self._of(self.culprits)
        silent = min(sighting.silent_s for sighting in blamed)
        text = f"{_who(blamed)} {_verb(blamed)} in {_places(blamed)}, silent for {silent:.0f} s"
        if self.why:
            text += f", {self.why}"
        others = [sighting for sighting in self.sightings if sighting.rank not in self.culprits]
        if others:
            what = "wait in" if all(_waits(sighting) for sighting in others) else "are in"
            text += f"; the other {len(others)} {what} {_places(others)}"
        return text

    @property
    def nodes(self) -> list[str]:
        """Of the culprits, where not all nodes are theirs: what a requeued job may do without."""
        blamed = _hosts(self._of(self.culprits))
        return sorted(blamed) if self.is_clear and blamed != _hosts(self.sightings) else []

    def _of(self, ranks: Iterable[int]) -> list[Sighting]:
        return [self.sightings[rank] for rank in ranks]


def is_due(sightings: Sequence[Sighting], patience_s: float) -> bool:
    """Whether all ranks have been silent for longer than any of them may be where it is. `patience_s`: of a rank that
    has never written a record."""
    allowed = max(s.record.patience_s if s.record else patience_s for s in sightings)
    return min(sighting.silent_s for sighting in sightings) >= allowed


def judge(sightings: Sequence[Sighting]) -> Verdict:
    """Who keeps the others waiting. `sightings`: of all ranks, in their order.

    First those whose records are not renewed: no Python runs there. Else commands decide: a part of command k waits
    only for parts of k on other ranks, so what the lowest command under way waits for is among its own ranks. There
    it is those who do not wait inside MPI. Waits in a GPU's collective are not seen, so where nobody waits inside MPI,
    or the ticks of those who do not differ, it may be any of them: a pipeline's last stage has fewer ticks than the
    stage that hangs and that it waits for.
    """
    everyone = tuple(sightings)
    stale = [sighting for sighting in everyone if sighting.is_stale or sighting.record is None]
    if stale:
        return _verdict(everyone, stale, "and not even its watchdog runs: stopped, killed, or its node is gone")
    records = [sighting.record for sighting in everyone if sighting.record is not None]
    commands = {record.command for record in records if record.command is not None}
    first = [s for s, record in zip(everyone, records, strict=True) if commands and record.command == min(commands)]
    working = [sighting for sighting in first if not _waits(sighting)]
    if len(working) > 1 and (len(working) == len(first) or _differ_in_ticks(working)):
        why = "and it is not clear which of them the others wait for: compare their stacks"
        return Verdict(everyone, _ranks(working), why, is_clear=False)
    if working:
        return _verdict(everyone, working, "")
    outside = [s for s, record in zip(everyone, records, strict=True) if record.command is None and not _waits(s)]
    if outside:
        return _verdict(everyone, outside, "")
    return _verdict(everyone, first or list(everyone), "each waiting for another one")


def report(
    verdict: Verdict, stacks: Mapping[int, str], environ: Mapping[str, str], when: str, slow: Sequence[str] = ()
) -> str:
    """`verdict.md`.

    stacks: of the ranks that wrote theirs, as faulthandler gives them. when: it is written. slow: what is known of
    ranks that were slow before.
    """
    first = verdict.first
    step = f"Step {first.step}. " if first else ""
    lines = [f"# Hang: {verdict.sentence}.", "", f"{step}The job was ended with exit code 86, {when}.", ""]
    lines += [
        "| rank | node | phase (role) | command | progress | silent | in MPI | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    blame = "**to blame**" if verdict.is_clear else "perhaps"
    lines += [_row(sighting, blame if sighting.rank in verdict.culprits else "") for sighting in verdict.sightings]
    lines += ["", "## Stacks", ""]
    for rank in verdict.culprits:
        found = stacks.get(rank)
        lines += [f"rank {rank}:" if found else f"rank {rank} gave none: no Python runs there.", ""]
        lines += ["```", found[:LONGEST_STACKS].rstrip(), "```", ""] if found else []
    lines += ["Those of all ranks that gave theirs: `heartbeat/stacks_*.txt`.", ""]
    lines += ["## Slow before", "", "```", *slow, "```", ""] if slow else []
    lines += ["## What to do", ""]
    lines += [_advice(verdict, environ), ""]
    return "\n".join(lines)


def _advice(verdict: Verdict, environ: Mapping[str, str]) -> str:
    text = "The run goes on from its newest checkpoint when it is started again. "
    if not verdict.is_clear:
        return text + "Which rank it was is not clear, and leaving out a node may not help: compare the stacks first."
    if not verdict.nodes:
        return text + "No single node is to blame: look at the stacks first."
    nodes, job = ",".join(verdict.nodes), environ.get("SLURM_JOB_ID")
    if job is None:
        return text + f"Leave out {nodes} (`sbatch --exclude={nodes}`) if this happens there again."
    return text + (
        f"To leave out {nodes}: `scontrol update JobId={job} ExcNodeList={nodes}` while the job is queued again, or "
        f"`sbatch --exclude={nodes}`."
    )


def _verdict(everyone: tuple[Sighting, ...], blamed: Sequence[Sighting], why: str) -> Verdict:
    if len(blamed) == len(everyone) > 1 and not why:
        why = "none of them in MPI; compare their stacks"
    return Verdict(everyone, _ranks(blamed), why)


def _ranks(sightings: Iterable[Sighting]) -> tuple[int, ...]:
    return tuple(sighting.rank for sighting in sightings)


def _differ_in_ticks(sightings: Iterable[Sighting]) -> bool:
    return len({sighting.record.ticks for sighting in sightings if sighting.record}) > 1


def _waits(sighting: Sighting) -> bool:
    return sighting.record is not None and not sighting.is_stale and sighting.record.waiting_s > 0


def _hosts(sightings: Iterable[Sighting]) -> set[str]:
    return {sighting.record.host if sighting.record else "?" for sighting in sightings}


def _who(sightings: Sequence[Sighting]) -> str:
    """rank 5 on n1; ranks 4-7 on n1; ranks 0, 3-5 on n0 and n1"""
    return f"{ranks_in_words([s.rank for s in sightings])} on {' and '.join(sorted(_hosts(sightings)))}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """rank 5; ranks 0, 3-5"""
    spans = []
    for _, span in groupby(enumerate(sorted(ranks)), key=lambda item: item[1] - item[0]):
        numbers = [rank for _, rank in span]
        spans.append(f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]))
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(spans)}"


def _verb(sightings: Sequence[Sighting]) -> str:
    return "is" if len(sightings) == 1 else "are"


def _places(sightings: Sequence[Sighting]) -> str:
    """update_actor (actor), the commonest first"""
    names = [_place(sighting) for sighting in sightings]
    return ", ".join(sorted(dict.fromkeys(names), key=lambda name: -names.count(name)))


def _place(sighting: Sighting) -> str:
    record = sighting.record
    if record is None:
        return "no known place"
    return f"{record.phase} ({record.role})" if record.role else str(record.phase)


def _row(sighting: Sighting, blame: str) -> str:
    record = sighting.record
    if record is None:
        return f"| {sighting.rank} | ? | never reported | | | | | {blame} |"
    told = replace(record, waiting_s=record.waiting_s + sighting.age_s) if _waits(sighting) else record
    waiting = f"waits {told.waiting_s:.0f} s" if _waits(sighting) else ("no report" if sighting.is_stale else "no")
    command = "" if record.command is None else str(record.command)
    cells = [sighting.rank, record.host, _place(sighting), command, record.ticks, f"{sighting.silent_s:.0f} s", waiting]
    return "| " + " | ".join(map(str, [*cells, blame])) + " |"
