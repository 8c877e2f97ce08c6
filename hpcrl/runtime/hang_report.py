"""Diagnosis of a hang from the last heartbeats of all ranks, and the text of `verdict.md`. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from hpcrl.runtime.rank_status import Heartbeat, PeerStatus

LONGEST_STACKS = 20_000  # characters of one rank's stack traces in the report


@dataclass(frozen=True)
class Diagnosis:
    """The ranks that cause a hang.

    culprits: the ranks that the others wait for, never empty. why: what they have in common, in words. is_clear: False
    if only some of them may be the cause, and the heartbeats do not show which.
    """

    ranks: tuple[PeerStatus, ...]
    culprits: tuple[int, ...]
    why: str
    is_clear: bool = True

    @property
    def first(self) -> Heartbeat | None:
        """The last heartbeat of the first culprit."""
        return self._of(self.culprits)[0].heartbeat

    @property
    def sentence(self) -> str:
        blamed = self._of(self.culprits)
        silent = min(peer.silent_s for peer in blamed)
        text = f"{_who(blamed)} {_verb(blamed)} in {_places(blamed)}, no progress for {silent:.0f} s"
        if self.why:
            text += f", {self.why}"
        others = [peer for peer in self.ranks if peer.rank not in self.culprits]
        if others:
            what = "wait in" if all(_waits(peer) for peer in others) else "are in"
            text += f"; the other {len(others)} {what} {_places(others)}"
        return text

    @property
    def nodes(self) -> list[str]:
        """The culprits' nodes, to be excluded when the job is requeued; empty if all nodes have culprits."""
        blamed = _hosts(self._of(self.culprits))
        return sorted(blamed) if self.is_clear and blamed != _hosts(self.ranks) else []

    def _of(self, ranks: Iterable[int]) -> list[PeerStatus]:
        return [self.ranks[rank] for rank in ranks]


def is_hang(ranks: Sequence[PeerStatus], timeout_s: float) -> bool:
    """Whether all ranks have been silent for longer than the longest of their timeouts.

    timeout_s: the timeout of a rank that has never written a heartbeat.
    """
    longest = max(peer.heartbeat.timeout_s if peer.heartbeat else timeout_s for peer in ranks)
    return min(peer.silent_s for peer in ranks) >= longest


def diagnose(ranks: Sequence[PeerStatus]) -> Diagnosis:
    """Find the ranks that the others wait for. `ranks`: all ranks, in their order.

    1. Ranks whose heartbeat is stale: no Python runs there.
    2. Otherwise commands decide. A part of command k waits only for parts of k on other ranks, so the cause is among
    the
       ranks in the lowest command: those that do not wait inside MPI.

    Waits for a GPU's collective are not visible. So if no rank waits inside MPI, or the ticks of those that do not wait
    differ, any of them may be the cause: the last stage of a pipeline has fewer ticks than the stage it waits for.
    """
    everyone = tuple(ranks)
    stale = [peer for peer in everyone if peer.is_stale or peer.heartbeat is None]
    if stale:
        return _diagnosis(everyone, stale, "and not even its watchdog runs: stopped, killed, or its node is down")
    heartbeats = [peer.heartbeat for peer in everyone if peer.heartbeat is not None]
    commands = {beat.command for beat in heartbeats if beat.command is not None}
    first = [
        peer for peer, beat in zip(everyone, heartbeats, strict=True) if commands and beat.command == min(commands)
    ]
    working = [peer for peer in first if not _waits(peer)]
    if len(working) > 1 and (len(working) == len(first) or _differ_in_ticks(working)):
        why = "and it is not clear which of them the others wait for: compare their stacks"
        return Diagnosis(everyone, _ranks(working), why, is_clear=False)
    if working:
        return _diagnosis(everyone, working, "")
    outside = [p for p, beat in zip(everyone, heartbeats, strict=True) if beat.command is None and not _waits(p)]
    if outside:
        return _diagnosis(everyone, outside, "")
    return _diagnosis(everyone, first or list(everyone), "each waiting for another one")


def render(
    diagnosis: Diagnosis, stacks: Mapping[int, str], environ: Mapping[str, str], when: str, slow: Sequence[str] = ()
) -> str:
    """The text of `verdict.md`.

    stacks: stack traces by rank, as faulthandler writes them. when: the time of the report. slow: what was logged about
    slow ranks before.
    """
    first = diagnosis.first
    step = f"Step {first.step}. " if first else ""
    lines = [f"# Hang: {diagnosis.sentence}.", "", f"{step}The job was ended with exit code 86, {when}.", ""]
    lines += [
        "| rank | node | phase (role) | command | progress | silent | in MPI | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    mark = "**to blame**" if diagnosis.is_clear else "perhaps"
    lines += [_row(peer, mark if peer.rank in diagnosis.culprits else "") for peer in diagnosis.ranks]
    lines += ["", "## Stacks", ""]
    for rank in diagnosis.culprits:
        found = stacks.get(rank)
        lines += [f"rank {rank}:" if found else f"rank {rank}: no stack traces, because no Python runs there.", ""]
        lines += ["```", found[:LONGEST_STACKS].rstrip(), "```", ""] if found else []
    lines += ["The stack traces of all ranks that wrote them: `heartbeat/stacks_*.txt`.", ""]
    lines += ["## Slow before", "", "```", *slow, "```", ""] if slow else []
    lines += ["## What to do", ""]
    lines += [_advice(diagnosis, environ), ""]
    return "\n".join(lines)


def _advice(diagnosis: Diagnosis, environ: Mapping[str, str]) -> str:
    text = "The run continues from its newest checkpoint when it is started again. "
    if not diagnosis.is_clear:
        return (
            text
            + "It is not clear which rank is the cause, so excluding a node may not help: compare the stacks first."
        )
    if not diagnosis.nodes:
        return text + "No single node is the cause: read the stacks first."
    nodes, job = ",".join(diagnosis.nodes), environ.get("SLURM_JOB_ID")
    if job is None:
        return text + f"If it hangs on {nodes} again, exclude the node (`sbatch --exclude={nodes}`)."
    return text + (
        f"To exclude {nodes}: `scontrol update JobId={job} ExcNodeList={nodes}` while the job is requeued, or "
        f"`sbatch --exclude={nodes}`."
    )


def _diagnosis(everyone: tuple[PeerStatus, ...], blamed: Sequence[PeerStatus], why: str) -> Diagnosis:
    if len(blamed) == len(everyone) > 1 and not why:
        why = "none of them in MPI; compare their stacks"
    return Diagnosis(everyone, _ranks(blamed), why)


def _ranks(peers: Iterable[PeerStatus]) -> tuple[int, ...]:
    return tuple(peer.rank for peer in peers)


def _differ_in_ticks(peers: Iterable[PeerStatus]) -> bool:
    return len({peer.heartbeat.ticks for peer in peers if peer.heartbeat}) > 1


def _waits(peer: PeerStatus) -> bool:
    return peer.heartbeat is not None and not peer.is_stale and peer.heartbeat.waiting_s > 0


def _hosts(peers: Iterable[PeerStatus]) -> set[str]:
    return {peer.heartbeat.host if peer.heartbeat else "?" for peer in peers}


def _who(peers: Sequence[PeerStatus]) -> str:
    """'rank 5 on n1'; 'ranks 4-7 on n1'; 'ranks 0, 3-5 on n0 and n1'"""
    return f"{format_ranks([peer.rank for peer in peers])} on {' and '.join(sorted(_hosts(peers)))}"


def format_ranks(ranks: Sequence[int]) -> str:
    """'rank 5'; 'ranks 0, 3-5'"""
    spans = []
    for _, span in groupby(enumerate(sorted(ranks)), key=lambda item: item[1] - item[0]):
        numbers = [rank for _, rank in span]
        spans.append(f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]))
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(spans)}"


def _verb(peers: Sequence[PeerStatus]) -> str:
    return "is" if len(peers) == 1 else "are"


def _places(peers: Sequence[PeerStatus]) -> str:
    """'update_actor (actor), gen (controller)', the most frequent one first"""
    names = [_place(peer) for peer in peers]
    return ", ".join(sorted(dict.fromkeys(names), key=lambda name: -names.count(name)))


def _place(peer: PeerStatus) -> str:
    beat = peer.heartbeat
    if beat is None:
        return "an unknown phase"
    return f"{beat.phase} ({beat.role})" if beat.role else str(beat.phase)


def _row(peer: PeerStatus, mark: str) -> str:
    beat = peer.heartbeat
    if beat is None:
        return f"| {peer.rank} | ? | never reported | | | | | {mark} |"
    known = replace(beat, waiting_s=beat.waiting_s + peer.age_s) if _waits(peer) else beat
    waiting = f"waits {known.waiting_s:.0f} s" if _waits(peer) else ("no report" if peer.is_stale else "no")
    command = "" if beat.command is None else str(beat.command)
    cells = [peer.rank, beat.host, _place(peer), command, beat.ticks, f"{peer.silent_s:.0f} s", waiting]
    return "| " + " | ".join(map(str, [*cells, mark])) + " |"
