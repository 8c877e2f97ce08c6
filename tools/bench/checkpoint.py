"""What a checkpoint costs the training loop, synchronous and asynchronous, side by side in one run.

    OMP_NUM_THREADS=1 mpiexec -n 2 python tools/bench checkpoint --folder DIR [--layers 8] [--repetitions 5] [--json]

A Llama-like model with Adam is saved under DIR, on the file system that is to be measured, from data-parallel ranks.
"blocked" is what the loop waits for; "until saved" lasts from the beginning of the save until the checkpoint counts;
between the two the ranks multiply matrices, and "phase" is how much longer one such multiplication takes meanwhile.
The floor of the asynchronous save is a copy of its bytes into new memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import NamedTuple

from bench.harness import timed

from hpcrl.config.roles import ACTOR
from hpcrl.config.schema import Config, OptimConfig, TrainerConfig
from hpcrl.controller.controller import Controller, run_program
from hpcrl.controller.register import Dispatch, register
from hpcrl.model.shape import ModelShape
from hpcrl.observe.record.progress import PhaseTimers
from hpcrl.run.saver import Saver
from hpcrl.runtime.groups import make_groups
from hpcrl.runtime.key_value_store import KeyValueStore
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.world import finish, start_mpi, start_torch
from hpcrl.sandbox import fork_server
from hpcrl.workers.model_worker import ModelWorker

BYTES_PER_WEIGHT = 16  # fp32: the weight, and the optimizer's copy and two moments


class Seconds(NamedTuple):
    sync_blocked: float
    async_blocked: float
    async_saved: float
    memcpy: float
    phase: float
    phase_while_saving: float


class BenchWorker(ModelWorker):
    spec = ACTOR

    @register(Dispatch.ONE_TO_ALL)
    def num_weights(self) -> int:
        return sum(tensor.numel() for tensor in self.engine.named_shards().values())

    @register(Dispatch.ONE_TO_ALL)
    def phase(self) -> float:
        """Seconds of some work on the model's weights."""
        matrix = next(tensor for name, tensor in self.engine.named_shards().items() if "linear_fc1" in name)
        return timed(lambda: matrix @ matrix.T)

    @register(Dispatch.ONE_TO_ALL)
    def memcpy(self, count: int) -> float:
        """Seconds of a copy of `count` bytes into new memory, in pieces as large as the weights."""
        sources = [tensor.clone() for tensor in self.engine.named_shards().values()]
        copies = []
        start, copied = time.perf_counter(), 0
        while copied < count:
            source = sources[len(copies) % len(sources)]
            copies.append(source.clone())
            copied += source.nbytes
        return time.perf_counter() - start


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder is made in it, and removed")
    parser.add_argument("--layers", type=int, default=8, help="of 2.8 M weights, 45 MB of a checkpoint")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one line for programs in place of the table")


def main(options: argparse.Namespace) -> None:
    fork_server.start()
    world = start_torch(start_mpi())
    layouts = {"actor": Layout(tuple(range(world.size)))}
    shape = ModelShape(
        num_layers=options.layers,
        hidden_size=512,
        ffn_hidden_size=1408,
        num_attention_heads=8,
        num_query_groups=4,
        head_dim=64,
        vocab_size=1024,
    )
    groups = make_groups(layouts, world.rank)["actor"]
    worker = BenchWorker(groups, shape, Config(), optim=OptimConfig(), total_updates=1)
    program = lambda controller: measure(world.key_value_store, controller, world.size, options)  # noqa: E731
    run_program(world, {"actor": worker}, {"actor": BenchWorker}, layouts, program)
    finish(0)


def measure(key_values: KeyValueStore, controller: Controller, num_ranks: int, options: argparse.Namespace) -> None:
    folder = options.folder / "bench_checkpoint"
    actor = controller["actor"]
    total = BYTES_PER_WEIGHT * actor.num_weights().get()[0]
    rounds: list[Seconds] = []
    for _ in range(1 + options.repetitions):
        shutil.rmtree(folder, ignore_errors=True)
        (sync_blocked, _, _), (async_blocked, saved, phases) = (
            save(key_values, controller, folder / name, asynchronous=name == "async") for name in ("sync", "async")
        )
        phase = statistics.median(max(actor.phase().get()) for _ in range(5))
        memcpy = max(actor.memcpy(total // num_ranks).get())
        rounds.append(Seconds(sync_blocked, async_blocked, saved, memcpy, phase, statistics.median(phases or [phase])))
    shutil.rmtree(folder)
    medians = Seconds(*(statistics.median(column) for column in zip(*rounds[1:], strict=True)))
    if options.json:
        show_json(medians, Seconds(*map(min, zip(*rounds[1:], strict=True))), total, num_ranks)
    else:
        show(medians, total, num_ranks)


def save(
    key_values: KeyValueStore, controller: Controller, root: Path, *, asynchronous: bool
) -> tuple[float, float, list[float]]:
    """Seconds that the loop was blocked, seconds until the checkpoint counts, and those of the phases meanwhile."""
    options = TrainerConfig.model_validate({"checkpoint": {"async_save": asynchronous}})
    saver, phases = Saver(key_values, options, root, PhaseTimers()), []
    start = time.perf_counter()
    blocked = timed(lambda: saver.begin(controller, 1, ("actor",), {}, lambda folder: {}))
    while saver.step_under_way is not None:
        phases.append(max(controller["actor"].phase().get()))
        blocked += timed(saver.poll)
    if not saver.wait():
        raise SystemExit(f"{root} cannot be written, see above")
    return blocked, time.perf_counter() - start, phases


def show(found: Seconds, total: int, num_ranks: int) -> None:
    print(f"{total / 1e6:.0f} MB from {num_ranks} ranks, medians")
    print(f"  sync   blocked      {found.sync_blocked:8.3f} s   {total / 1e9 / found.sync_blocked:.2f} GB/s")
    share = found.async_blocked / found.sync_blocked
    print(f"  async  blocked      {found.async_blocked:8.3f} s   {share:.1%} of sync")
    print(f"         until saved  {found.async_saved:8.3f} s")
    slower = found.phase_while_saving / found.phase - 1
    print(
        f"         phase        {found.phase_while_saving:8.3f} s   {found.phase:.3f} s without a save: {slower:+.0%}"
    )
    floor = found.async_blocked / found.memcpy
    print(f"  floor  memcpy       {found.memcpy:8.3f} s   async blocks {floor:.2f} times as long")


def show_json(medians: Seconds, least: Seconds, total: int, num_ranks: int) -> None:
    found = {f"least_{name}": seconds for name, seconds in least._asdict().items()}
    print(json.dumps({"bytes": total, "ranks": num_ranks, **medians._asdict(), **found}))
