"""DataProto: its methods undo each other, and do to columns what lists would do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.batch.data_proto import DataProto, same
from hpcrl.batch.ragged import Ragged


class Elsewhere:
    """A remote column that knows its row numbers, and counts how often it was brought here."""

    fetched = 0

    def __init__(self, source: Ragged, rows: np.ndarray | None = None) -> None:
        self.source = source
        self.rows = np.arange(len(source)) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: np.ndarray) -> Elsewhere:
        return Elsewhere(self.source, self.rows[rows])

    def concat(self, others: Sequence[Elsewhere]) -> Elsewhere:
        return Elsewhere(self.source, np.concatenate([self.rows, *(other.rows for other in others)]))

    def fetch(self) -> Ragged:
        Elsewhere.fetched += 1
        return self.source.take(self.rows)


@st.composite
def batches(draw, min_size: int = 0) -> DataProto:
    size = draw(st.integers(min_size, 6))
    rows = [draw(st.lists(st.integers(0, 9), max_size=4)) for _ in range(size)]
    ids = Ragged.from_rows(rows, np.int32)
    floats = Ragged.from_lengths(ids.values.astype(np.float32) / 3, ids.lengths)
    return DataProto(
        {"input_ids": ids, "old_log_probs": floats},
        {"uid": np.array([f"f:{i}:0" for i in range(size)], object), "score": np.arange(size) / 7},
        {"temperature": 1.0},
    )


def equal(a: DataProto, b: DataProto) -> bool:
    return same(vars(a), vars(b))


def uids(batch: DataProto) -> list[str]:
    return batch.samples["uid"].tolist()


@given(batches())
def test_select_and_union_round_trip(batch):
    parts = [batch.select(["input_ids", "uid"]), batch.select(["score", "old_log_probs"])]
    assert parts[0].names == ["input_ids", "uid"]
    assert equal(parts[0].union(parts[1]), batch)
    assert equal(batch.union(batch), batch)


@given(batches())
def test_pop_and_union_round_trip(batch):
    whole = batch.select(batch.names)
    popped = batch.pop(["old_log_probs", "uid"])
    assert batch.names == ["input_ids", "score"] and popped.names == ["old_log_probs", "uid"]
    assert equal(batch.union(popped), whole)


@given(batches())
def test_rename_and_back(batch):
    renamed = batch.rename("old_log_probs", "a").rename("uid", "b")
    assert renamed.names == ["input_ids", "a", "b", "score"]
    assert equal(renamed.rename("a", "old_log_probs").rename("b", "uid"), batch)


@given(batches(), st.integers(0, 4))
def test_repeat(batch, n):
    interleaved, tiled = batch.repeat(n), batch.repeat(n, interleave=False)
    assert uids(interleaved) == [uid for uid in uids(batch) for _ in range(n)]
    assert uids(tiled) == uids(batch) * n
    assert len(interleaved) == n * len(batch)
    if n:
        assert equal(interleaved[::n], batch) and equal(tiled[: len(batch)], batch)


@given(batches(), st.randoms(use_true_random=False))
def test_reorder_and_back(batch, random):
    order = list(range(len(batch)))
    random.shuffle(order)
    moved = batch.reorder(order)
    assert uids(moved) == [uids(batch)[i] for i in order]
    assert equal(moved.reorder(np.argsort(order)), batch)


@given(batches(), st.integers(-8, 8), st.integers(-8, 8), st.integers(1, 3))
def test_slices_are_those_of_lists(batch, start, stop, step):
    assert uids(batch[start:stop]) == uids(batch)[start:stop]
    assert uids(batch[start:stop:step]) == uids(batch)[start:stop:step]
    assert uids(batch[:stop]) == uids(batch)[:stop]


@given(batches(min_size=1), st.data())
def test_getitem(batch, data):
    mask = data.draw(st.lists(st.booleans(), min_size=len(batch), max_size=len(batch)))
    chosen = [i for i, keep in enumerate(mask) if keep]
    for rows in (mask, np.array(mask), chosen, np.array(chosen, dtype=np.int32)):
        assert equal(batch[rows], batch.reorder(chosen))
    assert uids(batch[-1]) == uids(batch)[-1:]


@given(batches(), st.integers(1, 9))
def test_chunks_are_even_and_concat_to_the_whole(batch, n):
    parts = batch.chunk(n)
    sizes = [len(part) for part in parts]
    assert len(parts) == n and max(sizes) - min(sizes) <= 1
    assert equal(DataProto.concat(parts), batch)


@given(batches(), batches())
def test_slices_of_a_concat_are_the_parts(a, b):
    both = DataProto.concat([a, b])
    assert equal(both[: len(a)], a) and equal(both[len(a) :], b)


@given(batches())
def test_padded_is_the_column_padded(batch):
    assert torch.equal(batch.padded("input_ids", fill=3), batch.fetch("input_ids").padded(3))


def test_methods_leave_the_batch_alone():
    batch = DataProto({"x": Ragged.from_rows([[1, 2], [3]])}, {"uid": np.array(["a", "b"])}, {"k": 1})
    before = batch.select(batch.names)
    batch.union(DataProto({}, {"score": np.array([1.0, 2.0])}, {"other": 2}))
    batch.rename("x", "y")
    batch.repeat(2).samples["uid"][0] = "z"
    batch.select(["x"]).meta_info["k"] = 5
    assert equal(batch, before)


def test_remote_columns_follow_without_being_brought_here():
    source = Ragged.from_rows([[1.0, 2.0], [3.0], [4.0]])
    batch = DataProto({"values": Elsewhere(source)}, {"uid": np.array(["a", "b", "c"])})
    Elsewhere.fetched = 0
    moved = DataProto.concat(batch.repeat(2).reorder([5, 0, 3]).chunk(2))
    assert Elsewhere.fetched == 0
    assert moved.fetch("values").equal(source.take([2, 0, 1])) and uids(moved) == ["c", "a", "b"]
    with pytest.raises(ValueError, match="call fetch"):
        moved.padded("values")
    with pytest.raises(ValueError, match="on this rank in one batch and on others in another"):
        DataProto.concat([batch, DataProto({"values": source}, batch.samples)])
    assert equal(batch.union(batch.select(["values"])), batch)
    with pytest.raises(ValueError, match="'values' is in both"):
        batch.union(DataProto({"values": Elsewhere(source)}))


def test_conflicts_are_named():
    a = DataProto({"x": Ragged.from_rows([[1], [2]])}, {"uid": np.array(["a", "b"])}, {"k": 1})
    with pytest.raises(ValueError, match="token-level column 'x' is in both"):
        a.union(DataProto({"x": Ragged.from_rows([[1], [3]])}))
    with pytest.raises(ValueError, match="sample-level column 'uid' is in both"):
        a.union(DataProto({}, {"uid": np.array(["a", "c"])}))
    with pytest.raises(ValueError, match="both token-level and sample-level"):
        a.union(DataProto({}, {"x": np.arange(2)}))
    with pytest.raises(ValueError, match="union of 2 samples with 3"):
        a.union(DataProto({}, {"score": np.arange(3)}))
    with pytest.raises(ValueError, match=r"meta_info\['k'\] is 1 and 2"):
        a.union(DataProto(meta_info={"k": 2}))
    with pytest.raises(ValueError, match="different lengths"):
        DataProto({"x": Ragged.from_rows([[1]])}, {"uid": np.array(["a", "b"])})
    with pytest.raises(ValueError, match="expected the same in all"):
        DataProto.concat([a, a.select(["x"])])
    with pytest.raises(ValueError, match="that column exists"):
        a.rename("x", "uid")
    for unknown in (lambda: a.select(["y"]), lambda: a.pop(["x", "y"]), lambda: a.padded("uid")):
        with pytest.raises(KeyError):
            unknown()
    assert a.names == ["x", "uid"]
    for rows in ([2], [-3], [True]):
        with pytest.raises(IndexError):
            a[rows]


def test_nan_in_samples_is_no_conflict():
    a, b = (DataProto({}, {"score": np.array([1.0, float("nan")])}) for _ in range(2))
    assert equal(a.union(b), a)


def test_metrics_of_the_parts_are_listed():
    one, two = (DataProto({}, {"n": np.array([i])}, {"metrics": {"loss": i}}) for i in (1, 2))
    three = DataProto.concat([DataProto.concat([one, two]), one])
    assert three.metrics == [{"loss": 1}, {"loss": 2}, {"loss": 1}]
    assert one.union(DataProto({}, {"m": np.zeros(1)})).metrics == [{"loss": 1}]
    assert DataProto().metrics == []


def test_a_hundred_thousand_samples():
    size = 100_000
    lengths = np.arange(size) % 5
    column = Ragged.from_lengths(np.arange(lengths.sum()), lengths)
    batch = DataProto({"x": column}, {"n": np.arange(size)})
    assert equal(DataProto.concat(batch.repeat(2).chunk(64))[::2], batch)
