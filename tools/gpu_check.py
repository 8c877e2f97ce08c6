"""One check of a machine with GPUs: `python tools/gpu_check.py NAME` under a launcher; gpu_check.sh runs them all.

The last line `pass: ...`, `fail: ...` or `skip: ...` is the outcome; the exit code is 0, another or 77. Rank 0 says it
when all ranks have come back; a rank that fails inside a check says so itself and ends the job, as others may wait for
it. None of it has ever run on a GPU: a failure may be the check's own fault.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from hpcrl.grid.layout import Layout
from hpcrl.launch.mpi_library import library_name
from hpcrl.launch.world import World, finish, start_mpi, start_torch
from hpcrl.model.params import Shard, shards
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.protocol import Request, SamplingParams

CODES = {"pass": 0, "skip": 77, "fail": 1}  # from the best to the worst
SHAPE = ModelShape(4, 256, 512, 8, 4, 32, 1000)
SPEEDS = (  # of the GRPO job, by the names of its metrics
    *("perf/throughput", "perf/mfu/actor", "perf/mfu/actor_infer", "perf/max_memory_allocated_gb"),
    *("timing_s/step", "timing_s/gen", "timing_s/update_actor", "response_length/mean"),
)


class Skip(Exception):
    """Says what the machine lacks. Raised inside a check by all ranks or by none."""


class Failed(Exception):
    """Says what was found and what was expected."""


def require(true: bool, line: str) -> None:
    if not true:
        raise Failed(line)


def whole_weights(shape: ModelShape, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors under Megatron's global names, fp32 on the host, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return {
        shard.name: 0.02 * torch.randn(shard.global_shape, generator=generator)
        if len(shard.global_shape) > 1
        else torch.ones(shard.global_shape)
        for shard in shards(shape, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
    }


def cut(whole: Tensor, shard: Shard) -> Tensor:
    """A rank's part of a parameter."""
    local = torch.zeros(shard.local_shape)
    source, target = whole.reshape(len(whole), -1), local.view(len(local), -1)
    for box in shard.boxes:
        (top, bottom), (left, right) = box.global_rows, box.global_cols
        part = target[box.local_row : box.local_row + bottom - top, box.local_col : box.local_col + right - left]
        part.copy_(source[top:bottom, left:right])
    return local


def held(
    shape: ModelShape, whole: dict[str, Tensor], layout: Layout, rank: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """What `rank` trains under `layout`, by global names."""
    coord = layout.coord(rank)
    table = shards(shape, tp_rank=coord.tp, tp_size=layout.tp, pp_rank=coord.pp, pp_size=layout.pp)
    return {shard.name: cut(whole[shard.name], shard).to(device, dtype) for shard in table}


def machine(world: World) -> str:
    from importlib import metadata

    from mpi4py import MPI

    def version(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "absent"

    chips = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
    names = ("tensorrt-llm", "megatron-core", "transformer-engine", "transformers", "triton", "mpi4py")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    parts = [
        f"{torch.cuda.device_count()} x {', '.join(chips)}",
        f"python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}",
        library_name(MPI.Get_library_version()),
        *(f"{name} {version(name)}" for name in names),
    ]
    return ", ".join(parts)


def refit(world: World) -> str:
    """NCCL moves weights between layouts, bit for bit."""
    import torch.distributed as dist

    from hpcrl.reshard.executor import Refit
    from hpcrl.reshard.planner import Resharding
    from hpcrl.reshard.windows import nodes_of

    whole, done = whole_weights(SHAPE), []
    ranks = tuple(range(world.size))
    device_group = dist.group.WORLD if world.size > 1 else None
    for source, destination in _layout_pairs(ranks):
        mine = held(SHAPE, whole, source, world.rank, world.device, torch.bfloat16)
        wanted = held(SHAPE, whole, destination, world.rank, world.device, torch.bfloat16)
        target = {name: torch.zeros_like(value) for name, value in wanted.items()}
        moving = Refit(
            Resharding(SHAPE, source, destination, 2, nodes=tuple(nodes_of(world.comm))),
            world.comm,
            world.rank,
            torch.bfloat16,
            device_group=device_group,
        )
        for _ in range(2):
            report = moving.run(mine, target)
        moving.close()
        wrong = [name for name, value in wanted.items() if not torch.equal(value, target[name])]
        wrong = sum(world.exchange(wrong), [])
        require(not wrong, f"{source} -> {destination}: {len(wrong)} tensors differ, such as {wrong[:1]}")
        done.append(f"tp{source.tp}pp{source.pp} to tp{destination.tp}: {report.gb_per_second:.1f} GB/s")
    return "; ".join(done)


def _layout_pairs(ranks: tuple[int, ...]) -> Iterator[tuple[Layout, Layout]]:
    yield Layout(ranks), Layout(ranks)
    if len(ranks) >= 2:
        yield Layout(ranks, tp=2), Layout(ranks)
        yield Layout(ranks, pp=2), Layout(ranks, tp=2)
    if len(ranks) >= 4:
        yield Layout(ranks, tp=2, pp=2), Layout(ranks)
        yield Layout(ranks, tp=4), Layout(ranks, tp=2)


def native(world: World, *, enforce_eager: bool) -> str:
    """The native engine on a GPU gives the log-probs that it gives on the CPU, where tests compare it with training."""
    from hpcrl.rollout.native.engine import NativeEngine

    whole = whole_weights(SHAPE)
    requests = [Request([1 + index, 7, 30 + index], f"p{index}") for index in range(16)]
    sampling = SamplingParams(48, temperature=0.0)
    found = []
    for device, eager in ((torch.device("cpu"), True), (world.device, enforce_eager)):
        engine = NativeEngine(
            SHAPE,
            None,
            0,
            1,
            torch.float32,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            max_model_len=64,
            enforce_eager=eager,
            device=device,
        )
        with torch.no_grad(), engine.updating_weights():
            for name, weight in engine.weights().items():
                weight.copy_(whole[name])
        engine.wake()
        found.append(engine.generate(requests, sampling, seed=0, step=0))
    worst, shared, total = 0.0, 0, 0
    for ours, theirs in zip(*found, strict=True):
        equal = next(
            (i for i, pair in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)) if pair[0] != pair[1]),
            len(ours.token_ids),
        )
        shared, total = shared + equal, total + len(ours.token_ids)
        if equal:
            worst = max(worst, float(abs(ours.log_probs[:equal] - theirs.log_probs[:equal]).max()))
    line = f"{shared} of {total} greedy tokens equal, their log-probs to {worst:.1e}"
    require(shared > 0.9 * total and worst < 1e-3, f"{line}; expected more than 90 % and 1e-3")
    return line


def training(world: World, *, with_te: bool) -> str:
    """The training engine's log-probs of what the native engine sampled are that engine's own, and it trains."""
    from hpcrl.batch.data_proto import DataProto
    from hpcrl.batch.ragged import Ragged
    from hpcrl.config.schema import OptimConfig, TransformerEngineConfig
    from hpcrl.engine.engine import TrainEngine
    from hpcrl.grid.groups import make_groups
    from hpcrl.rollout.native.engine import NativeEngine

    if with_te and importlib.util.find_spec("transformer_engine") is None:
        raise Skip("transformer_engine is not installed")
    te, optim = TransformerEngineConfig(enable=with_te), OptimConfig(lr=1e-3)
    groups = make_groups({"actor": Layout((world.rank,))}, world.rank)["actor"]
    trained = TrainEngine(SHAPE, groups, optim=optim, total_steps=2, te=te)
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 64}
    native = NativeEngine(SHAPE, None, 0, 1, torch.float32, **sizes, device=world.device)
    with torch.no_grad(), native.updating_weights():
        for name, weight in native.weights().items():
            weight.copy_(trained.named_shards()[name])
    native.wake()
    requests = [Request([1 + index, 7, 30 + index], f"p{index}") for index in range(16)]
    drawn = native.generate(requests, SamplingParams(48, temperature=1.0), seed=0, step=0)
    rows = [[*request.prompt_ids, *one.token_ids] for request, one in zip(requests, drawn, strict=True)]
    lengths = torch.tensor([len(one.token_ids) for one in drawn])
    columns = {
        "input_ids": Ragged.from_rows([torch.tensor(row, dtype=torch.int32) for row in rows]),
        "response_mask": Ragged.from_lengths(torch.ones(int(lengths.sum())), lengths),
    }
    found = trained.log_probs(DataProto(columns), max_tokens=512, temperature=1.0)["log_probs"].values
    gap = float((found - torch.cat([torch.from_numpy(one.log_probs) for one in drawn])).abs().max())
    require(gap < 1e-3, f"log-probs of training and rollout differ by {gap:.1e}; expected less than 1e-3")
    trained.train(DataProto(columns), max_tokens=512, loss=lambda out, _: (-out["log_probs"].sum() / 768, {}))
    after = trained.log_probs(DataProto(columns), max_tokens=512, temperature=1.0)["log_probs"].values
    moved = float(after.mean() - found.mean())
    line = f"log-probs equal the rollout's to {gap:.1e}; a step on them moves their mean by {moved:.1e}"
    require(moved > 0, f"{line}; expected it to grow")
    return line


def grpo(world: World) -> str:
    """Five steps of GRPO on a random model of 0.5 B parameters: tokens a second, MFU and memory of the last ones."""
    from hpcrl.config.loader import load_config
    from hpcrl.launch.job import make_run_directory, run_directory
    from hpcrl.trainer import ppo
    from hpcrl.trainer.prepare import derive, with_presets

    with tempfile.TemporaryDirectory() as folder:
        tool = Path(__file__).with_name("prepare_countdown.py")
        subprocess.run([sys.executable, tool, "--out", folder, "--sft-rows", "64"], check=True, capture_output=True)
        template = Path(__file__).parents[1] / "configs" / "grpo_0_5b.yaml"
        data = f"data.train_files=[{folder}/train.parquet]"
        config = with_presets(load_config(template, [data, f"run.dir={folder}/runs"]))
        make_run_directory(run_directory(config))
        ppo.run(world, config, derive(config, world.size))
        lines = (run_directory(config) / "metrics.jsonl").read_text().splitlines()
    last = [json.loads(line) for line in lines[-3:]]
    shown = {name: sum(line[name] for line in last) / len(last) for name in SPEEDS if name in last[-1]}
    require("perf/mfu/actor" in shown, f"no MFU among the metrics: {sorted(last[-1])}")
    return ", ".join(f"{name} {value:.4g}" for name, value in shown.items())


CHECKS: dict[str, Callable[[World], str]] = {
    "machine": machine,
    "refit": refit,
    "native_eager": lambda world: native(world, enforce_eager=True),
    "native_graphs": lambda world: native(world, enforce_eager=False),
    "training": lambda world: training(world, with_te=False),
    "training_te": lambda world: training(world, with_te=True),
    "grpo": grpo,
}


def usable(world: World) -> str:
    if world.device.type != "cuda":
        raise Skip("no GPU can be used here")
    if world.local_size > torch.cuda.device_count():
        raise Skip(f"{world.local_size} ranks share {torch.cuda.device_count()} GPUs, which NCCL refuses")
    return ""


def agreed(world: World, check: Callable[[World], str]) -> tuple[str, str]:
    """The worst rank's outcome and line, on all ranks. What is raised but Skip is raised on this rank alone."""
    try:
        found = "pass", check(world)
    except Skip as error:
        found = "skip", str(error)
    return max(world.exchange(found), key=lambda each: list(CODES).index(each[0]))


def say(outcome: str, line: str) -> None:
    print(f"{outcome}: {' '.join(line.split())}\n", end="", flush=True)  # one write: ranks share the output


def main(name: str) -> NoReturn:
    from hpcrl.launch import children
    from hpcrl.launch.exits import is_user_error
    from hpcrl.launch.world import abort

    children.start()
    checks, with_trtllm = CHECKS, name.startswith("trtllm_")
    if with_trtllm:
        from tools.gpu_check_trtllm import CHECKS as checks
    comm = start_mpi()
    try:
        world = start_torch(comm, with_tensorrt_llm=with_trtllm)
        outcome, line = agreed(world, usable)
        if outcome == "pass":
            outcome, line = agreed(world, checks[name])
    except Exception as error:
        if not getattr(error, "everywhere", False):
            if isinstance(error, Failed) or is_user_error(error):
                say("fail", str(error))
            abort(error, rank=comm.rank, role="gpu_check", phase=name)
        outcome, line = "fail", str(error)
    if comm.rank == 0:
        say(outcome, line)
    finish(CODES[outcome])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/gpu_check.py NAME, under mpiexec or srun")
    from tools.gpu_check import main as run  # the module that gpu_check_trtllm.py imports: __main__ would be another

    run(sys.argv[1])
