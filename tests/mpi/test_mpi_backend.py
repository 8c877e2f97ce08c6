"""Every call of the mpi_host backend x dtype, against gloo and against values computed from what all ranks put in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, ReduceScatterOptions
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _coalescing_manager

if TYPE_CHECKING:
    from hpcrl.runtime.world import World

pytestmark = [
    pytest.mark.ci_world(2, 3),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch 2.13 renames what 2.9 calls
]

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
OPS = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.AVG,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "product": ReduceOp.PRODUCT,
}
Group = dist.ProcessGroup | None


@pytest.fixture(scope="module")
def gloo(world: World) -> dist.ProcessGroup:
    return dist.new_group(backend="gloo")


def values(rank: int, dtype: torch.dtype, rows: int = 4, salt: int = 0) -> Tensor:
    """(rows, 3) of what `rank` puts in: 1, 2 or 3, so that sums and products of a few ranks are exact everywhere."""
    grid = torch.arange(rows * 3).view(rows, 3)
    numbers = (grid * 7 + rank * 5 + salt * 11) // 3 % 3
    return numbers.bool() if dtype is torch.bool else (numbers + 1).to(dtype)


def as_is(tensor: Tensor) -> Tensor:
    return tensor.clone()


def transposed(tensor: Tensor) -> Tensor:
    """The same values, not contiguous."""
    return tensor.t().contiguous().t()


def reduced(inputs: list[Tensor], op: str) -> Tensor:
    """What reducing `inputs` must give: halves are added in fp32 and rounded once, a sum of bool is "any"."""
    dtype = inputs[0].dtype
    wide = dtype if dtype is torch.float64 else torch.float32 if dtype in FLOATS else torch.int64
    stack = torch.stack(inputs).to(wide)
    if op == "avg":
        total = stack.sum(0)
        return (total / len(inputs) if wide.is_floating_point else total // len(inputs)).to(dtype)
    result = {"sum": stack.sum(0), "min": stack.amin(0), "max": stack.amax(0), "product": stack.prod(0)}[op]
    return (result != 0) if dtype is torch.bool else result.to(dtype)


class Call(NamedTuple):
    """A collective on rank `r` of `n`: how to run it, and what must come out. `put` lays tensors out in memory."""

    run: Callable[[Group, int, int, torch.dtype, Callable[[Tensor], Tensor], str], list[Tensor]]
    expected: Callable[[int, int, torch.dtype, str], list[Tensor]]


def root(n: int) -> int:
    return n - 1


def run_all_reduce(group, r, n, dtype, put, op):
    x = put(values(r, dtype))
    dist.all_reduce(x, OPS[op], group=group)
    return [x]


def run_reduce(group, r, n, dtype, put, op):
    x = put(values(r, dtype))
    dist.reduce(x, root(n), OPS[op], group=group)
    return [x] if r == root(n) else []


def run_reduce_scatter(group, r, n, dtype, put, op):
    out = put(torch.zeros(4, 3, dtype=dtype))
    dist.reduce_scatter(out, [put(values(r, dtype, salt=s)) for s in range(n)], OPS[op], group=group)
    return [out]


def run_reduce_scatter_tensor(group, r, n, dtype, put, op):
    out = put(torch.zeros(2, 3, dtype=dtype))
    dist.reduce_scatter_tensor(out, put(values(r, dtype, rows=2 * n)), OPS[op], group=group)
    return [out]


def run_all_reduce_coalesced(group, r, n, dtype, put, op):
    out = [put(values(r, dtype, salt=s)) for s in range(2)]
    with _coalescing_manager(group):
        for x in out:
            dist.all_reduce(x, OPS[op], group=group)
    return out


def run_reduce_scatter_tensor_coalesced(group, r, n, dtype, put, op):
    out = [put(torch.zeros(2, 3, dtype=dtype)) for _ in range(2)]
    with _coalescing_manager(group):
        for s, part in enumerate(out):
            dist.reduce_scatter_tensor(part, put(values(r, dtype, rows=2 * n, salt=s)), OPS[op], group=group)
    return out


def run_broadcast(group, r, n, dtype, put, op):
    x = put(values(r, dtype))
    dist.broadcast(x, root(n), group=group)
    return [x]


def run_all_gather(group, r, n, dtype, put, op):
    out = [put(torch.zeros(4, 3, dtype=dtype)) for _ in range(n)]
    dist.all_gather(out, put(values(r, dtype)), group=group)
    return out


def run_all_gather_into_tensor(group, r, n, dtype, put, op):
    out = put(torch.zeros(4 * n, 3, dtype=dtype))
    dist.all_gather_into_tensor(out, put(values(r, dtype)), group=group)
    return [out]


def run_all_gather_into_tensor_coalesced(group, r, n, dtype, put, op):
    out = [put(torch.zeros(4 * n, 3, dtype=dtype)) for _ in range(2)]
    with _coalescing_manager(group):
        for s, whole in enumerate(out):
            dist.all_gather_into_tensor(whole, put(values(r, dtype, salt=s)), group=group)
    return out


def run_gather(group, r, n, dtype, put, op):
    out = [put(torch.zeros(4, 3, dtype=dtype)) for _ in range(n)] if r == root(n) else None
    dist.gather(put(values(r, dtype)), out, root(n), group=group)
    return out or []


def run_scatter(group, r, n, dtype, put, op):
    out = put(torch.zeros(4, 3, dtype=dtype))
    parts = [put(values(r, dtype, salt=s)) for s in range(n)] if r == root(n) else None
    dist.scatter(out, parts, root(n), group=group)
    return [out]


def run_all_to_all(group, r, n, dtype, put, op):
    out = [put(torch.zeros(s + 1, 3, dtype=dtype)) for s in range(n)]
    dist.all_to_all(out, [put(values(r, dtype, rows=r + 1, salt=s)) for s in range(n)], group=group)
    return out


def run_all_to_all_single(group, r, n, dtype, put, op):
    out = put(torch.zeros(2 * n, 3, dtype=dtype))
    dist.all_to_all_single(out, put(values(r, dtype, rows=2 * n)), group=group)
    return [out]


def run_all_to_all_uneven(group, r, n, dtype, put, op):
    """Rank r sends (r + s) % 3 rows to rank s, so some pairs exchange nothing."""
    rows = [(r + s) % 3 for s in range(n)]
    send = torch.cat([values(r, dtype, rows=rows[s], salt=s) for s in range(n)])
    out = put(torch.zeros(sum(rows), 3, dtype=dtype))
    dist.all_to_all_single(out, put(send), rows, rows, group=group)
    return [out]


def run_ring(group, r, n, dtype, put, op):
    out = put(torch.zeros(4, 3, dtype=dtype))
    ops = [
        dist.P2POp(dist.isend, put(values(r, dtype)), (r + 1) % n, group),
        dist.P2POp(dist.irecv, out, (r - 1) % n, group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [out]


REDUCTIONS = {
    "all_reduce": Call(run_all_reduce, lambda r, n, d, op: [reduced([values(s, d) for s in range(n)], op)]),
    "reduce": Call(
        run_reduce, lambda r, n, d, op: [reduced([values(s, d) for s in range(n)], op)] if r == root(n) else []
    ),
    "reduce_scatter": Call(
        run_reduce_scatter, lambda r, n, d, op: [reduced([values(s, d, salt=r) for s in range(n)], op)]
    ),
    "reduce_scatter_tensor": Call(
        run_reduce_scatter_tensor,
        lambda r, n, d, op: [reduced([values(s, d, rows=2 * n)[2 * r : 2 * r + 2] for s in range(n)], op)],
    ),
    "allreduce_coalesced": Call(
        run_all_reduce_coalesced,
        lambda r, n, d, op: [reduced([values(s, d, salt=x) for s in range(n)], op) for x in range(2)],
    ),
    "reduce_scatter_tensor_coalesced": Call(
        run_reduce_scatter_tensor_coalesced,
        lambda r, n, d, op: [
            reduced([values(s, d, rows=2 * n, salt=x)[2 * r : 2 * r + 2] for s in range(n)], op) for x in range(2)
        ],
    ),
}
MOVES = {
    "broadcast": Call(run_broadcast, lambda r, n, d, op: [values(root(n), d)]),
    "all_gather": Call(run_all_gather, lambda r, n, d, op: [values(s, d) for s in range(n)]),
    "all_gather_into_tensor": Call(
        run_all_gather_into_tensor, lambda r, n, d, op: [torch.cat([values(s, d) for s in range(n)])]
    ),
    "allgather_into_tensor_coalesced": Call(
        run_all_gather_into_tensor_coalesced,
        lambda r, n, d, op: [torch.cat([values(s, d, salt=x) for s in range(n)]) for x in range(2)],
    ),
    "gather": Call(run_gather, lambda r, n, d, op: [values(s, d) for s in range(n)] if r == root(n) else []),
    "scatter": Call(run_scatter, lambda r, n, d, op: [values(root(n), d, salt=r)]),
    "all_to_all": Call(run_all_to_all, lambda r, n, d, op: [values(s, d, rows=s + 1, salt=r) for s in range(n)]),
    "all_to_all_single": Call(
        run_all_to_all_single,
        lambda r, n, d, op: [torch.cat([values(s, d, rows=2 * n)[2 * r : 2 * r + 2] for s in range(n)])],
    ),
    "all_to_all_uneven": Call(
        run_all_to_all_uneven,
        lambda r, n, d, op: [torch.cat([values(s, d, rows=(r + s) % 3, salt=r) for s in range(n)])],
    ),
    "ring": Call(run_ring, lambda r, n, d, op: [values((r - 1) % n, d)]),
}
# gloo knows no int16, averages no integers, exchanges equal sizes only in an all_to_all, and sends nothing to itself.
GLOO_LACKS = {("all_to_all", dtype) for dtype in DTYPES} | {(call, torch.int16) for call in (*REDUCTIONS, *MOVES)}


def assert_same(got: list[Tensor], want: list[Tensor], what: str) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")


def check(call: str, dtype: torch.dtype, op: str, world: World, gloo: dist.ProcessGroup) -> None:
    run, expected = (REDUCTIONS | MOVES)[call]
    r, n = world.rank, world.size
    want = expected(r, n, dtype, op)
    for put in (as_is, transposed):
        got = run(None, r, n, dtype, put, op)
        assert [g.dtype for g in got] == [dtype] * len(want)
        assert_same(got, want, f"{call} {dtype} {op} {put.__name__}")
    if (call, dtype) not in GLOO_LACKS and op != "avg" and not (call == "ring" and n == 1):
        # gloo adds bools as bytes, so that its True may be a 2
        peer = [g.to(torch.uint8).bool() if dtype is torch.bool else g for g in run(gloo, r, n, dtype, as_is, op)]
        assert_same(got, peer, f"{call} {dtype} {op} against gloo")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", REDUCTIONS)
def test_reduction_equals_gloo(call: str, dtype: torch.dtype, world: World, gloo: dist.ProcessGroup) -> None:
    for op in OPS:
        if not (op == "avg" and dtype is torch.bool):
            check(call, dtype, op, world, gloo)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", MOVES)
def test_move_equals_gloo(call: str, dtype: torch.dtype, world: World, gloo: dist.ProcessGroup) -> None:
    check(call, dtype, "", world, gloo)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_are_rounded_once(dtype: torch.dtype, world: World) -> None:
    """In bf16 256 + 1 is 256, so adding rank after rank in bf16 would lose every 1; fp16 does so from 2048 on."""
    large = 256.0 if dtype is torch.bfloat16 else 2048.0
    x = torch.tensor([large if world.rank == 0 else 1.0], dtype=dtype)
    dist.all_reduce(x)
    assert x.item() == torch.tensor(large + world.size - 1).to(dtype).item()


@pytest.mark.parametrize("op", [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR])
def test_bitwise_reductions(op: ReduceOp, world: World, gloo: dist.ProcessGroup) -> None:
    ours, theirs = (torch.tensor([world.rank + 1, 6, 255]) for _ in range(2))
    dist.all_reduce(ours, op)
    dist.all_reduce(theirs, op, group=gloo)
    assert torch.equal(ours, theirs)


def test_what_has_no_meaning_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match="cannot reduce torch.bool"):
        dist.all_reduce(torch.ones(2, dtype=torch.bool), ReduceOp.AVG)
    with pytest.raises(ValueError, match="must be .* times the part"):
        dist.all_gather_into_tensor(torch.empty(5 * world.size + 1), torch.ones(5))
    with pytest.raises(ValueError, match="split sizes"):
        dist.all_to_all_single(torch.empty(3), torch.empty(3), [1] * (world.size + 3), [1] * (world.size + 3))


def test_scalars_and_empty_tensors(world: World) -> None:
    one = torch.tensor(1.0)
    dist.all_reduce(one)
    assert one.item() == world.size
    nothing = torch.empty(0, 3)
    dist.all_reduce(nothing)
    dist.broadcast(nothing, 0)
    whole = torch.empty(0, 3)
    dist.all_gather_into_tensor(whole, nothing)
    dist.all_to_all_single(whole, nothing, [0] * world.size, [0] * world.size)


def test_parameters_and_gradients_are_carried_without_autograd(world: World) -> None:
    weight = torch.nn.Parameter(torch.full((3, 2), float(world.rank)))
    dist.broadcast(weight, 0)
    assert weight.requires_grad and weight.abs().sum() == 0
    turned = weight.t()
    dist.all_reduce(turned.detach())
    assert weight.abs().sum() == 0


def test_slice_of_the_same_buffer(world: World) -> None:
    """megatron reduces a buffer into this rank's slice of it, and gathers the buffer from the slices."""
    n, r = world.size, world.rank
    buffer = torch.arange(2.0 * n) + r
    mine = buffer[2 * r : 2 * r + 2]
    want = (torch.arange(2.0 * n) * n + n * (n - 1) / 2)[2 * r : 2 * r + 2]
    dist.reduce_scatter_tensor(mine, buffer)
    assert torch.equal(mine, want)
    dist.all_gather_into_tensor(buffer, mine)
    assert torch.equal(buffer, torch.arange(2.0 * n) * n + n * (n - 1) / 2)


@pytest.mark.parametrize("async_ops", [False, True])
def test_coalescing_manager(async_ops: bool, world: World) -> None:
    """How megatron's DistributedDataParallel calls, synchronous or not."""
    n, r = world.size, world.rank
    summed = [torch.full((k,), float(r), dtype=torch.bfloat16) for k in (1, 3)]
    with _coalescing_manager(dist.group.WORLD, async_ops=async_ops) as manager:
        for x in summed:
            dist.all_reduce(x)
    if async_ops:
        manager.wait()
    assert all(torch.equal(x, torch.full_like(x, n * (n - 1) / 2)) for x in summed)

    wholes = [torch.arange(2.0 * n) + salt for salt in (0, 5)]
    shards = [torch.empty(2) for _ in wholes]
    with _coalescing_manager(dist.group.WORLD, async_ops=async_ops) as manager:
        for shard, whole in zip(shards, wholes, strict=True):
            dist.reduce_scatter_tensor(shard, whole, ReduceOp.AVG)
    if async_ops:
        manager.wait()
    assert all(torch.equal(s, w[2 * r : 2 * r + 2]) for s, w in zip(shards, wholes, strict=True))

    gathered = [torch.empty(2 * n) for _ in shards]
    with _coalescing_manager(dist.group.WORLD, async_ops=async_ops) as manager:
        for whole, shard in zip(gathered, shards, strict=True):
            dist.all_gather_into_tensor(whole, shard)
    if async_ops:
        manager.wait()
    assert all(torch.equal(g, w) for g, w in zip(gathered, wholes, strict=True))

    received = torch.empty(1)
    with _coalescing_manager(dist.group.WORLD, device=torch.device("cpu"), async_ops=async_ops) as manager:
        dist.isend(torch.tensor([float(r)]), (r + 1) % n)
        dist.irecv(received, (r - 1) % n)
    if async_ops:
        manager.wait()
    assert received.item() == (r - 1) % n


def test_method_names_of_torch_2_9(world: World) -> None:
    """torch 2.9 calls the same collectives by other names, which torch 2.13 no longer does."""
    n, r = world.size, world.rank
    group = dist.group.WORLD
    opts = ReduceScatterOptions()
    whole, part = torch.empty(n), torch.tensor([float(r)])
    group._allgather_base(whole, part, AllgatherOptions()).wait()
    assert torch.equal(whole, torch.arange(float(n)))
    group.allgather_into_tensor_coalesced([whole.zero_()], [part]).wait()
    assert torch.equal(whole, torch.arange(float(n)))
    group._reduce_scatter_base(part, whole, opts).wait()
    assert part.item() == n * r
    group.reduce_scatter_tensor_coalesced([part], [whole], opts).wait()
    assert part.item() == n * r
    group.alltoall_base(whole, torch.full((n,), float(r)), [], [], AllToAllOptions()).wait()
    assert torch.equal(whole, torch.arange(float(n)))


def test_functional_collectives(world: World) -> None:
    """They come through C++, which finds the group by its name and calls back into Python."""
    import torch.distributed._functional_collectives as functional

    x = functional.all_reduce(torch.full((2,), float(world.rank)), "sum", dist.group.WORLD)
    assert x.tolist() == [world.size * (world.size - 1) / 2] * 2
    whole = functional.all_gather_tensor(torch.tensor([world.rank]), 0, dist.group.WORLD)
    assert whole.tolist() == list(range(world.size))


def test_object_collectives(world: World) -> None:
    n, r = world.size, world.rank
    everyone = [None] * n
    dist.all_gather_object(everyone, {"rank": r, "text": "x" * r})
    assert everyone == [{"rank": s, "text": "x" * s} for s in range(n)]
    objects = [("from", r), None] if r == n - 1 else [None, None]
    dist.broadcast_object_list(objects, n - 1)
    assert objects == [("from", n - 1), None]
    gathered = [None] * n if r == 0 else None
    dist.gather_object(r * 1.5, gathered, 0)
    assert r != 0 or gathered == [s * 1.5 for s in range(n)]
    mine = [None]
    dist.scatter_object_list(mine, [f"to {s}" for s in range(n)] if r == 0 else None, 0)
    assert mine == [f"to {r}"]


def test_groups_overlap(world: World) -> None:
    """Overlapping groups, made in one order by all; a group's ranks are in the order of its list."""
    n, r = world.size, world.rank
    members = [[s, s + 1] for s in range(n - 1)] + [list(range(0, n, 2)), list(range(n))]
    groups = [dist.new_group(ranks) for ranks in members]
    for ranks, group in zip(members, groups, strict=True):
        if r not in ranks:
            assert group == dist.GroupMember.NON_GROUP_MEMBER
            continue
        assert (group.size(), group.rank()) == (len(ranks), ranks.index(r))
        x = torch.tensor([float(r)])
        dist.all_reduce(x, group=group)
        assert x.item() == sum(ranks)
        dist.broadcast(x.fill_(r), ranks[-1], group=group)
        assert x.item() == ranks[-1]
    for group in groups:
        dist.destroy_process_group(group)


def test_group_of_one_makes_no_communicator(world: World) -> None:
    from mpi4py import MPI

    alone = dist.new_subgroups_by_enumeration([[s] for s in range(world.size)])[0]
    assert alone._comm == MPI.COMM_SELF
    for name, call in (REDUCTIONS | MOVES).items():
        for dtype in (torch.float32, torch.bfloat16, torch.bool):
            if name not in ("reduce", "broadcast", "gather", "scatter", "ring"):
                got = call.run(alone, 0, 1, dtype, transposed, "sum")
                assert_same(got, call.expected(0, 1, dtype, "sum"), f"{name} {dtype}")
    x = torch.tensor([3.0])
    dist.broadcast(x, world.rank, group=alone)
    dist.reduce(x, world.rank, group=alone)
    dist.barrier(group=alone)
    assert x.item() == 3.0
    dist.destroy_process_group(alone)


@pytest.mark.world(2)
def test_communicators_are_freed(world: World) -> None:
    """MPICH has about 2,046 of them."""
    for _ in range(2100):
        dist.destroy_process_group(dist.new_group([0, 1]))


LARGE = 1 << 18  # elements; MPI sends as much only when the receiver is there


def test_ring_of_large_messages(world: World) -> None:
    """Everybody sends before anybody receives: isend must not wait for the receiver."""
    n, r = world.size, world.rank
    sends = [dist.isend(torch.full((LARGE,), float(r)), (r + 1) % n, tag=tag) for tag in range(2)]
    received = [torch.empty(LARGE) for _ in sends]
    receives = [dist.irecv(x, (r - 1) % n, tag=tag) for tag, x in reversed(list(enumerate(received)))]
    for work in receives + sends:
        assert work.wait()
    assert all(bool((x == (r - 1) % n).all()) for x in received)


def test_receive_posted_before_send(world: World) -> None:
    n, r = world.size, world.rank
    received = torch.zeros(3, 2).t()  # not contiguous: the values arrive when the work ends
    work = dist.irecv(received, (r - 1) % n)
    future = work.get_future()
    fired: list[torch.futures.Future] = []
    future.add_done_callback(fired.append)
    assert not work.is_completed() and not future.done() and not fired
    dist.barrier()
    sent = dist.isend(torch.arange(6.0).view(2, 3) + r, (r + 1) % n)
    assert torch.equal(future.wait()[0], torch.arange(6.0).view(2, 3) + (r - 1) % n)
    assert work.is_completed() and work.is_success() and len(fired) == 1
    assert work.wait() and work.wait() and len(fired) == 1
    sent.wait()


def test_future_of_a_finished_collective(world: World) -> None:
    x = torch.tensor([1.0])
    work = dist.all_reduce(x, async_op=True)
    assert work.is_completed() and work.get_future().done()
    assert work.get_future().then(lambda future: future.value()[0] + 1).wait().item() == world.size + 1
    work.wait()


def test_receive_from_any_source(world: World) -> None:
    n, r = world.size, world.rank
    if r == 0:
        x = torch.empty(1)
        sources = set()
        for _ in range(1, n):
            sources.add(dist.recv(x))
            assert x.item() in sources
        assert sources == set(range(1, n))
    else:
        dist.send(torch.tensor([float(r)]), 0)
    dist.barrier()


def test_dropped_sends_keep_their_memory(world: World) -> None:
    n, r = world.size, world.rank
    for k in range(4):
        dist.isend(torch.full((LARGE,), float(k)), (r + 1) % n)
    noise = [torch.full((LARGE,), -1.0) for _ in range(4)]  # would land in the memory of the dropped tensors
    x = torch.empty(LARGE)
    for k in range(4):
        dist.recv(x, (r - 1) % n)
        assert bool((x == k).all())
    assert len(noise) == 4
    dist.barrier()


@pytest.mark.parametrize("room", [2, 8])
def test_work_raises_where_it_is_waited_for(room: int, world: World) -> None:
    """A message of 4 elements into a tensor of 2 or 8. The group works on afterwards."""
    n, r = world.size, world.rank
    received = torch.zeros(room)
    work = dist.irecv(received, (r - 1) % n)
    future = work.get_future()
    dist.isend(torch.ones(4), (r + 1) % n).wait()
    for _ in range(2):
        with pytest.raises(Exception, match="(?i)trunc|must agree on the size"):
            work.wait()
    assert work.is_completed() and not work.is_success() and work.exception() is not None
    with pytest.raises(Exception, match="(?i)trunc|must agree on the size"):
        future.wait()
    x = torch.tensor([1.0])
    dist.all_reduce(x)
    assert x.item() == n
