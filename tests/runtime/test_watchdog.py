"""Who is blamed for a hang, by hand-made records; and the time that a watchdog counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.runtime import rank_status
from hpcrl.runtime.rank_status import Heartbeat, Peers, PeerStatus, RankStatus
from hpcrl.runtime.watchdog import Clock, ProgressTimer, diagnose, format_ranks, is_hang, render


def record(rank: int, phase: str = "update_actor", role: str | None = "actor", **known: Any) -> Heartbeat:
    """Two ranks on a node; by default in command 7, no progress for 43 s, not waiting."""
    state = {"command": 7, "ticks": 2, "silent_s": 43.0, "waiting_s": 0.0, "timeout_s": 40.0, **known}
    return Heartbeat(rank, f"n{rank // 2}", 100 + rank, role, phase, step=3, beat=9, **state)


def seen(*records: Heartbeat | None, stale: tuple[int, ...] = ()) -> list[PeerStatus]:
    return [
        PeerStatus(rank, known, 20.0 if rank in stale else 0.0, rank in stale or known is None)
        for rank, known in enumerate(records)
    ]


def waits(rank: int, *place: Any, **known: Any) -> Heartbeat:
    return record(rank, *place, waiting_s=41.0, **known)


def test_a_stopped_rank_is_blamed_before_those_who_wait_for_it() -> None:
    diagnosis = diagnose(seen(waits(0), waits(1), waits(2), record(3), stale=(3,)))
    assert diagnosis.culprits == (3,) and diagnosis.nodes == ["n1"]
    assert diagnosis.sentence.startswith(
        "rank 3 on n1 is in update_actor (actor), no progress for 63 s, and not even its"
    )
    assert diagnosis.sentence.endswith("the other 3 wait in update_actor (actor)")


def test_who_computes_while_the_others_wait() -> None:
    diagnosis = diagnose(seen(waits(0, "gen", "controller", command=None), waits(1), record(2), waits(3)))
    assert diagnosis.culprits == (2,)
    assert diagnosis.sentence == (
        "rank 2 on n1 is in update_actor (actor), no progress for 43 s; "
        "the other 3 wait in update_actor (actor), gen (controller)"
    )


def test_the_lowest_command_under_way_is_what_all_wait_for() -> None:
    """Ranks 0 and 1 are in a later command, for which ranks 2 and 3 cannot wait."""
    late = [waits(2, "update_weights", "refit", command=6), waits(3, "update_weights", "refit", command=6)]
    diagnosis = diagnose(seen(record(0), waits(1), *late))
    assert diagnosis.culprits == (2, 3) and "each waiting for another one" in diagnosis.sentence
    working = record(3, "update_weights", "refit", command=6)
    assert diagnose(seen(record(0), waits(1), late[0], working)).culprits == (3,)


def test_rank_0s_own_program_is_blamed_when_all_wait_for_its_next_command() -> None:
    idle = [waits(rank, "next command", "controller", command=None) for rank in (1, 2, 3)]
    diagnosis = diagnose(seen(record(0, "dump_rollout_generations", "controller", command=None), *idle))
    assert diagnosis.culprits == (0,) and "is in dump_rollout_generations (controller)" in diagnosis.sentence


@pytest.mark.parametrize("ticks", [(4, 3, 4, 4), (4, 4, 1, 1), (2, 2, 2, 2)])
def test_in_a_gpus_collective_nobody_waits_in_mpi_and_no_rank_is_singled_out(ticks: tuple[int, ...]) -> None:
    """A pipeline's last stage, which waits for the first one, has fewer ticks than it: they prove nothing."""
    idle = [waits(rank, "next command", "controller", command=None) for rank in (4, 5)]
    diagnosis = diagnose(seen(*(record(rank, ticks=number) for rank, number in enumerate(ticks)), *idle))
    assert diagnosis.culprits == (0, 1, 2, 3) and diagnosis.nodes == []
    assert "not clear which of them" in diagnosis.sentence and "compare their stacks" in diagnosis.sentence
    text = render(diagnosis, {}, {"SLURM_JOB_ID": "812"}, "today")
    assert "xclude" not in text and "ExcNodeList" not in text and "to blame" not in text


def test_of_several_who_compute_while_others_wait_ticks_decide_nothing() -> None:
    diagnosis = diagnose(seen(waits(0), waits(1), record(2, ticks=1), record(3, ticks=2)))
    assert diagnosis.culprits == (2, 3) and not diagnosis.is_clear and diagnosis.nodes == []
    diagnosis = diagnose(seen(waits(0), waits(1), record(2), record(3)))
    assert diagnosis.culprits == (2, 3) and diagnosis.nodes == ["n1"]


def test_a_rank_that_never_reported_is_blamed() -> None:
    diagnosis = diagnose(seen(waits(0), None))
    assert diagnosis.culprits == (1,) and diagnosis.first is None
    assert "never reported" in render(diagnosis, {}, {}, "today")


def test_the_report_has_stacks_and_says_how_to_go_on_without_the_node() -> None:
    diagnosis = diagnose(seen(waits(0), waits(1), record(2), waits(3)))
    text = render(diagnosis, {2: 'File "x.py", line 7 in stuck'}, {"SLURM_JOB_ID": "812"}, "today")
    assert text.startswith("# Hang: rank 2 on n1 is in update_actor") and "line 7 in stuck" in text
    assert "scontrol update JobId=812 ExcNodeList=n1" in text and text.count("**to blame**") == 1


def test_any_progress_and_any_longer_patience_put_the_verdict_off() -> None:
    assert is_hang(seen(waits(0), record(1)), 60.0)
    assert not is_hang(seen(waits(0), record(1, silent_s=1.0)), 60.0)
    assert not is_hang(seen(waits(0), record(1, timeout_s=44.0)), 60.0)
    assert not is_hang(seen(waits(0), None), 60.0)
    assert is_hang(seen(waits(0), record(1, silent_s=25.0), stale=(1,)), 60.0), "silent since its record stopped, too"


def test_format_ranks() -> None:
    assert [format_ranks(ranks) for ranks in ([5], [0, 3, 4, 5], [2, 0])] == ["rank 5", "ranks 0, 3-5", "ranks 0, 2"]


class Settings:
    enable, publish_seconds, min_seconds, factor, first_seconds = True, 5.0, 60.0, 10.0, 3600.0


def test_the_timeout_grows_with_the_silence_of_a_phase_and_ranks_that_wait_have_none() -> None:
    here = RankStatus()
    timer = ProgressTimer(here, Settings)
    with here.within("actor", "save", 1):
        assert timer.silent_seconds(10.0) == 0.0 and timer.timeout(0.0) == 3600.0
        assert timer.silent_seconds(90.0) == 80.0 and timer.timeout(70.0) == 60.0
    with here.within("actor", "save", 2):
        timer.silent_seconds(100.0)
        assert timer.timeout(0.0) == 900.0  # ten times the 90 s from its begin until it was seen to have ended
        here.tick()
        assert timer.silent_seconds(130.0) == 0.0
    with here.within("actor", "update_actor", 3):
        pass
    with here.within("actor", "update_actor", 4):
        timer.silent_seconds(140.0)
        assert timer.timeout(0.0) == 60.0
    assert (here.role, here.phase, here.command) == (None, None, None)


def test_a_thread_that_writes_ends_the_silence_and_leaves_the_phase_its_timeout() -> None:
    here = RankStatus()
    timer = ProgressTimer(here, Settings)
    with here.within("actor", "update_actor", 1):
        assert timer.silent_seconds(10.0) == 0.0
        here.tick_background()
        assert timer.silent_seconds(90.0) == 0.0 and timer.silent_seconds(100.0) == 10.0
    timer.silent_seconds(110.0)
    with here.within("actor", "update_actor", 2):
        timer.silent_seconds(120.0)
        assert timer.timeout(0.0) == 1000.0  # ten times the whole 100 s


def test_time_in_which_the_watchdog_itself_was_held_up_does_not_count() -> None:
    times = iter([0.0, 5.0, 10.0, 1000.0, 1005.0])
    clock = Clock(5.0, lambda: next(times))
    assert [clock.now() for _ in range(4)] == [5.0, 10.0, 20.0, 25.0]


def test_records_survive_being_torn_and_age_by_the_readers_clock(tmp_path: Path) -> None:
    rank_status.write_heartbeat(tmp_path, record(1))
    peers = Peers(tmp_path, stale_after_s=20.0)
    (first,) = peers.read([1], now=100.0)
    assert first.heartbeat == record(1) and not first.is_stale
    rank_status.heartbeat_path(tmp_path, 1).write_text('{"rank": 1, "ho')
    (torn,) = peers.read([1], now=110.0)
    assert torn.heartbeat == record(1) and torn.age_s == 10.0
    assert peers.read([1], now=121.0)[0].is_stale
    rank_status.write_heartbeat(tmp_path, record(1, timeout_s=1e9, role="r" * 500, phase="p" * 500))
    assert rank_status.heartbeat_path(tmp_path, 1).stat().st_size == rank_status.BLOCK
    assert peers.read([0], now=121.0)[0].heartbeat is None


@pytest.mark.parametrize("fails", [False, True])
def test_an_exception_leaves_the_status_where_it_happened(fails: bool) -> None:
    here = RankStatus(phase="start")
    try:
        with here.within("actor", "update_actor", 5):
            if fails:
                raise ValueError
    except ValueError:
        pass
    assert here.name == ("actor.update_actor" if fails else "-.start")
