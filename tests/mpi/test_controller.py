"""The controller on toy workers: every dispatch mode, any order of get(), overlapping and disjoint pools."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.controller.columns import PlacedColumn
from hpcrl.controller.controller import Controller, replica_column, run_program
from hpcrl.controller.register import Dispatch, Worker, register
from hpcrl.runtime.layout import Layout

pytestmark = pytest.mark.ci_world(4)


class Toy(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO, reads=("uid", "size"), writes=("ids",))
    def make(self, batch: DataProto) -> DataProto:
        """Row i holds `size` copies of its uid."""
        uid, size = _columns(batch)
        made = Ragged.from_lengths(np.repeat(uid, size).astype(np.int32), size)
        return DataProto({"ids": made}, {"made_by": np.full(len(batch), self.rank)}, {})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("ids",), writes=("doubled",))
    def double(self, batch: DataProto) -> DataProto:
        ids = batch.tokens["ids"]
        self.seen = ids
        return DataProto({"doubled": Ragged(ids.values * 2, ids.offsets)}, {}, {"metrics": {"rows": len(ids)}})

    @register(Dispatch.DP_COMPUTE_METRIC, reads=("ids", "doubled", "uid"))
    def check(self, batch: DataProto) -> int:
        ids, doubled, uid = batch.tokens["ids"], batch.tokens["doubled"], batch.samples["uid"]
        assert np.array_equal(ids.values * 2, doubled.values)
        first = [int(ids.row(i)[0]) for i in range(len(ids))]
        assert first == uid.tolist()
        return len(ids)

    @register(Dispatch.DP_COMPUTE_METRIC, reads=("uid",), group_by="uid")
    def grouped(self, batch: DataProto) -> list[int]:
        return sorted(set(batch.samples["uid"].tolist()))

    @register(Dispatch.DP_COMPUTE_METRIC, reads=("ids",))
    def seen_by_replica(self, batch: DataProto) -> int:
        return int(batch.tokens["ids"].values.sum())

    @register(Dispatch.ONE_TO_ALL)
    def whoami(self, greeting: str) -> str:
        return f"{greeting} {self.rank}"

    @register(Dispatch.ONE_TO_ALL)
    def nap(self) -> None:
        time.sleep(0.2)

    @register(Dispatch.ONE_TO_ALL)
    def nap_shortly(self) -> None:
        time.sleep(1e-3)

    @register(Dispatch.ORDER_ALL)
    def until_called(self, limit: int) -> None:
        """Runs until a command arrives that is not reentrant; the leader decides for its replica."""
        self.context.notify_controller("begun")
        rounds = itertools.count()
        while not self.context.broadcast(self.layout, self.context.poll() if self.is_leader else None):
            assert next(rounds) < limit
            time.sleep(1e-4)
        self.context.notify_controller("ended")

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("uid", "size"), writes=("ids",), leader_only=True, reentrant=True)
    def make_reentrant(self, batch: DataProto) -> DataProto:
        return self.make(batch)

    @register(Dispatch.DP_COMPUTE_METRIC, reads=("ids",), leader_only=True, reentrant=True)
    def sum_reentrant(self, batch: DataProto) -> int:
        return int(batch.tokens["ids"].values.sum())

    @register(Dispatch.DP_ORDER, reads=("uid",), leader_only=True, reentrant=True)
    def order(self, batch: DataProto) -> None:
        self.context.notify_controller(batch.samples["uid"].tolist())


def _columns(batch: DataProto) -> tuple[np.ndarray, np.ndarray]:
    return batch.samples["uid"], batch.samples["size"]


def play(world, layouts: dict[str, Layout], program):
    workers = {role: Toy(layout, world.rank) for role, layout in layouts.items() if world.rank in layout}
    return run_program(world, workers, dict.fromkeys(layouts, Toy), layouts, program)


def pools(size: int) -> list[dict[str, Layout]]:
    """Role layouts over `size` ranks: the same ranks, overlapping ones, disjoint ones, models of several ranks."""
    everyone = tuple(range(size))
    cases = [{"a": Layout(everyone), "b": Layout(everyone)}]
    if size >= 2:
        half = size // 2
        cases += [
            {"a": Layout(everyone, tp=2), "b": Layout(everyone, pp=2)},
            {"a": Layout(everyone[:half]), "b": Layout(everyone[half:])},
            {"a": Layout(everyone[1:]), "b": Layout(everyone[:half])},
        ]
    if size == 4:
        cases += [{"a": Layout((3, 1)), "b": Layout((1, 0, 2), tp=3)}, {"a": Layout((2,)), "b": Layout((3, 2), pp=2)}]
    return cases


def new_batch(rows: int) -> DataProto:
    uid = np.arange(rows) + 1
    return DataProto({}, {"uid": uid, "size": uid % 5 + 1}, {})


def test_columns_reach_every_role(world) -> None:
    def program(controller: Controller) -> None:
        for rows in (0, 1, 13):
            batch = new_batch(rows)
            batch = batch.union(controller["a"].make(batch).get())
            batch = batch.union(controller["b"].double(batch).get())
            for role in ("a", "b", "a"):
                assert sum(controller[role].check(batch).get()) == rows
            back = batch.reorder(np.arange(rows)[::-1])
            assert sum(controller["a"].check(back).get()) == rows
            twice = DataProto.concat([batch, back])[: rows + 2] if rows else batch
            assert sum(controller["b"].check(twice).get()) == min(rows + 2, 2 * rows)
            expected = [u for u, n in zip(*_columns(batch), strict=True) for _ in range(n)]
            assert isinstance(batch.tokens["ids"], PlacedColumn)
            assert batch.fetch("ids").values.tolist() == expected
            assert batch.fetch("doubled").values.tolist() == [2 * u for u in expected]

    for layouts in pools(world.size):
        play(world, layouts, program)


def test_any_order_of_get_is_free_of_deadlock(world) -> None:
    def program(controller: Controller) -> None:
        batch = new_batch(7)
        batch = batch.union(controller["a"].make(batch).get())
        for order in itertools.permutations(range(4)):
            futures = [
                controller["b"].double(batch),
                controller["a"].seen_by_replica(batch),
                controller["b"].seen_by_replica(batch),
                controller["a"].whoami("I am"),
            ]
            for index in order:
                futures[index].get()

    for layouts in pools(world.size):
        play(world, layouts, program)


@pytest.mark.world(2, 4)
def test_rank_0_works_while_it_waits_for_roles_on_other_ranks(world) -> None:
    layouts = {"a": Layout((0,)), "b": Layout(tuple(range(1, world.size)))}

    def program(controller: Controller) -> None:
        napping = controller["b"].nap()
        mine = controller["a"].whoami("at work:")
        napping.get()
        assert not controller._own  # run while rank 0 waited for the nap
        assert mine.get() == ["at work: 0"]
        controller["b"].whoami("never asked for")  # a future without a get() does not block the end

    play(world, layouts, program)


def test_assignment_decides_who_works_on_a_row(world) -> None:
    layouts = {"a": Layout(tuple(range(world.size)))}

    def program(controller: Controller) -> None:
        batch = new_batch(11)
        batch.samples[replica_column(world.size)] = (np.arange(11) * 7 % world.size).astype(np.int32)
        made = controller["a"].make(batch).get()
        assert made.samples["made_by"].tolist() == (np.arange(11) * 7 % world.size).tolist()

    play(world, layouts, program)


def test_groups_stay_together(world) -> None:
    layouts = {"a": Layout(tuple(range(world.size)))}

    def program(controller: Controller) -> None:
        batch = new_batch(5).repeat(3, interleave=False)
        seen = controller["a"].grouped(batch).get()
        assert sorted(itertools.chain(*seen)) == [1, 2, 3, 4, 5]

    play(world, layouts, program)


@pytest.mark.world(2, 4)
def test_commands_run_inside_a_method_that_polls(world) -> None:
    """Rank 0 leads; a method of role a goes on while columns are made there, read there, and fetched from there by role
    b; it ends when a command arrives that is not reentrant. In any order of get()."""
    size = world.size
    everyone = tuple(range(1, size))
    cases = [{"a": Layout(everyone), "b": Layout((0,))}]
    if size == 4:
        cases = [{"a": Layout((1, 2), tp=tp), "b": Layout((3,))} for tp in (1, 2)]

    def program(controller: Controller) -> None:
        a, b = controller["a"], controller["b"]
        notes: list[tuple[int, object]] = []
        controller.listener = lambda rank, note: notes.append((rank, note))
        for order in itertools.permutations(range(3)):
            notes.clear()
            a.until_called(100_000)
            batch = new_batch(7)
            batch = batch.union(a.make_reentrant(batch).get())
            total = int((batch.samples["uid"] * batch.samples["size"]).sum())
            futures = [a.sum_reentrant(batch), b.seen_by_replica(batch), a.order(batch)]
            values = {index: futures[index].get() for index in order}
            assert (sum(values[0]), sum(values[1]), values[2]) == (total, total, [])
            told = [uid for _, note in notes if isinstance(note, list) for uid in note]
            while len(told) < 7:
                controller.listen()
                told = [uid for _, note in notes if isinstance(note, list) for uid in note]
            assert sorted(told) == list(range(1, 8))
            assert "ended" not in [note for _, note in notes]
            a.whoami("I am").get()
            for said in ("begun", "ended"):
                assert sorted(rank for rank, note in notes if note == said) == list(a.layout.ranks)
        a.until_called(100_000)  # and the end of the program ends it too

    for layouts in cases:
        play(world, layouts, program)


@pytest.mark.world(2, 4)
def test_rows_of_others_are_waited_for_outside(world) -> None:
    """A reentrant command that needs rows of another rank ends the method instead."""
    layouts = {"a": Layout(tuple(range(1, world.size))), "b": Layout((0,))}

    def program(controller: Controller) -> None:
        batch = new_batch(7)
        batch = batch.union(controller["b"].make(batch).get())
        controller["a"].until_called(100_000)
        expected = int((batch.samples["uid"] * batch.samples["size"]).sum())
        assert sum(controller["a"].sum_reentrant(batch).get()) == expected

    play(world, layouts, program)


@pytest.mark.world(2, 4)
def test_background_goes_on_while_rank_0_waits(world) -> None:
    layouts = {"a": Layout(tuple(range(world.size)))}

    def program(controller: Controller) -> None:
        a = controller["a"]
        futures = [a.whoami("first")]

        def chain() -> None:
            while len(futures) < 4 and futures[-1].is_ready:
                futures[-1].get()
                futures.append(a.whoami("next"))

        controller.background = chain
        for _ in range(6):
            a.nap_shortly().get()
        assert len(futures) == 4
        controller.background = None
        assert futures[-1].get() == [f"next {rank}" for rank in range(world.size)]

    play(world, layouts, program)


def test_wrong_calls_are_named(world) -> None:
    layouts = {"a": Layout(tuple(range(world.size)), tp=2 if world.size > 1 else 1)}

    def program(controller: Controller) -> None:
        a = controller["a"]
        assert a.whoami("rank").get() == [f"rank {r}" for r in range(world.size)]
        with pytest.raises(AttributeError, match="no registered method 'wohami'"):
            a.wohami()
        with pytest.raises(KeyError, match="reads 'ids'"):
            a.double(new_batch(3))

    play(world, layouts, program)


def test_ranks_free_columns_that_rank_0_dropped(world) -> None:
    layouts = {"a": Layout(tuple(range(world.size))), "b": Layout(tuple(range(world.size))[::-1])}

    def program(controller: Controller) -> None:
        store = controller._executor.store
        for _ in range(3):
            batch = new_batch(40)
            batch = batch.union(controller["a"].make(batch).get())
            batch = batch.union(controller["b"].double(batch).get())
            assert store
            del batch
            controller["a"].whoami("").get()
        assert not store

    play(world, layouts, program)


def test_rank_0_moves_no_tokens(world) -> None:
    """Control traffic grows with the number of samples, not with their length."""
    layouts = {"a": Layout(tuple(range(world.size))), "b": Layout(tuple(range(world.size))[::-1])}

    def program(controller: Controller) -> None:
        seen = []
        for size in (10, 10_000):
            batch = new_batch(16)
            batch.samples["size"] = np.full(16, size)
            batch = batch.union(controller["a"].make(batch).get())
            batch = batch.union(controller["b"].double(batch).get())
            controller["a"].seen_by_replica(batch).get()
            seen.append(controller.collect_traffic())
        for key in ("perf/controller_bytes_sent", "perf/controller_bytes_received"):
            assert abs(seen[1][key] - seen[0][key]) <= 128

    play(world, layouts, program)


def test_busy_seconds_are_without_what_others_took(world) -> None:
    """Rank 0 works in `uneven`, and the others wait for it there."""
    layouts = {"a": Layout(tuple(range(world.size)))}

    def program(controller: Controller) -> None:
        controller.ask_busy().get()
        controller["a"].uneven(world.comm.size).get()
        reports = controller.ask_busy().get()
        assert [report.rank for report in reports] == list(range(world.size))
        first, *others = [report.seconds["a.uneven"] for report in reports]
        assert first >= 0.3 and all(seconds < first / 2 for seconds in others)
        assert all(report.seconds == {} for report in controller.ask_busy().get())

    workers = {"a": Uneven(layouts["a"], world)}
    run_program(world, workers, {"a": Uneven}, layouts, program)


@pytest.mark.world(2, 4)
def test_busy_seconds_are_reported_from_inside_a_long_method(world) -> None:
    layouts = {"b": Layout(tuple(range(1, world.size)))}

    def program(controller: Controller) -> None:
        controller["b"].until_called(limit=10**6)
        assert len(controller.ask_busy().get()) == world.size
        controller["b"].whoami("x").get()
        assert all("b.until_called" in report.seconds for report in controller.ask_busy().get()[1:])

    play(world, layouts, program)


def test_where_a_rank_is_can_be_seen_by_others(world) -> None:
    layouts = {"a": Layout(tuple(range(world.size)))}
    here = world.status
    before, switches = here.name, here.switches

    def program(controller: Controller) -> None:
        assert here.name == "controller.program"
        with controller.phase("adv"):
            assert (here.name, here.command) == ("controller.adv", None)
            first = controller["a"].where().get()
            second = controller["a"].where().get()
            assert here.name == "controller.adv"
        assert all((name, ticks) == ("a.where", 1) for name, _, ticks in first + second)
        assert {command for _, command, _ in first} < {command for _, command, _ in first + second}

    workers = {"a": Uneven(layouts["a"], world)}
    run_program(world, workers, {"a": Uneven}, layouts, program)
    assert here.name == before and here.switches > switches and "a.where" in here.ended


class Uneven(Worker):
    def __init__(self, layout: Layout, world) -> None:
        super().__init__(layout, world.rank)
        self.world = world

    @register(Dispatch.ONE_TO_ALL)
    def uneven(self, size: int) -> None:
        if self.rank == 0:
            time.sleep(0.3)
        self.world.barrier()

    @register(Dispatch.ONE_TO_ALL)
    def where(self) -> tuple[str, int | None, int]:
        self.tick()
        return self.status.name, self.status.command, self.status.ticks
