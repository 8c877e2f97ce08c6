"""CPU time and messages of rank 0, against the number of ranks and of samples, without models.

    python tools/bench controller [--ranks 8 256] [--samples 1024 8192] [--json FILE]
    python tools/bench controller --plan CONFIG [key=value ...]

Each number of ranks is an MPI job of processes of numpy and mpi4py on this machine. Rank 0 runs the loop of `hpcrl
train` with its controller, its source of samples and its assignment of samples to replicas. The workers do nothing
but return columns of the right sizes. A slope is the exponent of a power of ranks or of samples, fitted to all rows:
1 is linear.

With --plan nothing runs: it times what rank 0 computes for a step of a job as large as job.nodes says.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import math
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from bench.harness import on_ranks, with_threads

from hpcrl.algorithms.metrics import Mean, Sum
from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.controller.columns import Block, Location, Read, Shares
from hpcrl.controller.controller import Controller, replica_column, run_program
from hpcrl.controller.executor import Command
from hpcrl.controller.register import Dispatch, Worker, register
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.mpi import back_off, wait_time
from hpcrl.runtime.world import World, finish, start_mpi

if TYPE_CHECKING:
    from hpcrl.config.derive import Derived
    from hpcrl.config.schema import Config
    from hpcrl.jobs.train import Train
    from hpcrl.run.calls import Call
    from hpcrl.run.run import Run

ALGORITHMS = {"grpo": "grpo", "ppo": "gae"}  # algorithm.adv_estimator
RESPONSES = 8  # to a prompt
MINI_BATCHES = 4
NUM_METRICS = 20  # of a method and mini-batch
PROFILED = 40  # functions that --profile prints
FORBIDDEN = ("torch", "megatron", "transformers")

CONFIG = """
run: {{name: bench, dir: {folder}}}
model:
  num_layers: 2
  hidden_size: 128
  ffn_hidden_size: 320
  num_attention_heads: 4
  num_query_groups: 2
  vocab_size: 256
  max_position_embeddings: {longest}
placement:
  pools: {{all: "*"}}
  actor: {{pool: all, tp: 2}}
  critic: {{pool: all, pp: 2}}
  ref: {{pool: all, tp: 2}}
  rollout: {{pool: all}}
data:
  train_files: [none.jsonl]
  train_batch_size: {prompts}
  max_prompt_length: {prompt}
  max_response_length: {response}
rollout: {{engine: native, n: {n}}}
actor:
  ppo_mini_batch_size: {mini_batch}
  ppo_max_token_len_per_gpu: {longest}
  use_kl_loss: true
critic: {{ppo_max_token_len_per_gpu: {longest}}}
ref: {{log_prob_max_token_len_per_gpu: {longest}}}
algorithm: {{adv_estimator: {estimator}}}
trainer: {{total_training_steps: {steps}, save_freq: -1, test_freq: -1, logger: []}}
"""


def column(lengths: np.ndarray, dtype: type) -> Ragged:
    return Ragged.from_lengths(np.zeros(int(lengths.sum()), dtype), lengths)


def metrics(name: str) -> dict[str, Mean]:
    return {f"{name}/{number}": Mean(1.0, 1.0) for number in range(NUM_METRICS)}


class ActorStub(Worker):
    """Registered as `hpcrl.workers.actor.ActorWorker`; `tests/tools/test_bench_controller.py` compares them."""

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("input_ids", "response_mask", "pictures?", "sequence_starts?", "rollout_log_probs", "routed_experts?"),
        writes=("old_log_probs", "entropies?", "sum_pi_squared?", "routed_experts?"),
        phase="old_log_prob",
    )
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        return written(batch, "old_log_probs")

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=(
            *("response_mask", "token_level_scores", "rollout_log_probs"),
            *("old_log_probs?", "ref_log_prob?", "values?", "sum_pi_squared?"),
            *("turn_states?", "prompt", "prompt_length", "reward_components?", "reward_baseline?"),
        ),
        writes=("token_level_rewards", "advantages", "returns", "rollout_is_weights?", "loss_mask?"),
        group_by="prompt",
        leader_only=True,
        phase="adv",
    )
    def compute_advantage(self, batch: DataProto, *, kl_coef: float = 0.0) -> DataProto:
        return written(batch, "token_level_rewards", "advantages", "returns")

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=(
            *("input_ids", "response_mask", "pictures?", "sequence_starts?"),
            *("loss_mask?", "rollout_log_probs", "old_log_probs?", "advantages"),
            *("ref_log_prob?", "rollout_is_weights?", "teacher_log_prob?", "teacher_topk_log_probs?"),
            *("teacher_topk_ids?", "routed_experts?", "prompt", "sample_index"),
        ),
        writes=("old_log_probs?", "entropies?", "update_log_probs?", "new_log_probs?", "loss_gradients?"),
        updates=True,
    )
    def update_actor(self, batch: DataProto) -> DataProto:
        return DataProto({}, {}, {"metrics": [metrics("actor")] * MINI_BATCHES})


class RefStub(Worker):
    """Registered as `hpcrl.workers.frozen.RefWorker`."""

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("input_ids", "response_mask", "pictures?", "sequence_starts?"),
        writes=("ref_log_prob",),
        phase="ref",
    )
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        return written(batch, "ref_log_prob")


class CriticStub(Worker):
    """Registered as `hpcrl.workers.actor.CriticWorker`."""

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("input_ids", "response_mask", "pictures?", "sequence_starts?"),
        writes=("values",),
        phase="values",
    )
    def compute_values(self, batch: DataProto) -> DataProto:
        return written(batch, "values")

    @register(
        Dispatch.DP_COMPUTE_METRIC,
        reads=(
            *("input_ids", "response_mask", "pictures?", "sequence_starts?"),
            *("loss_mask?", "values", "returns", "prompt"),
        ),
        updates=True,
    )
    def update_critic(self, batch: DataProto) -> list[dict[str, Mean]]:
        return [metrics("critic")] * MINI_BATCHES


class RolloutStub(Worker):
    """Registered as `hpcrl.workers.rollout.RolloutWorker`. Prompts have half of `tokens`, responses up to the other."""

    def __init__(self, layout: Layout, rank: int, tokens: int) -> None:
        super().__init__(layout, rank)
        self.tokens = tokens

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("row", "epoch", "sample_index"),
        writes=(
            "input_ids",
            "response_mask",
            "rollout_log_probs",
            "routed_experts?",
            "pictures?",
            "turn_rewards?",
            "turn_states?",
            "sequence_starts?",
        ),
    )
    def generate(self, batch: DataProto, sampling: Any) -> DataProto:
        rows, index = batch.samples["row"], batch.samples["sample_index"]
        sixteenths = 1 + (7919 * rows + 104729 * index) % 8  # so that balance does not depend on `tokens`
        response = (sixteenths * (self.tokens // 16)).astype(np.int32)
        prompt = np.full(len(batch), self.tokens // 2, np.int32)
        tokens = {
            "input_ids": column(prompt + response, np.int32),
            "response_mask": column(response, np.int32),
            "rollout_log_probs": column(response, np.float32),
        }
        reasons = np.full(len(batch), "stop", object)
        samples = {"prompt_length": prompt, "response_length": response, "finish_reason": reasons}
        return DataProto(dict(tokens), samples, {"metrics": metrics("rollout")})


class ScorerStub(Worker):
    """Registered as `hpcrl.workers.scorer.ScorerWorker`."""

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=(
            *("input_ids", "response_mask", "row", "finish_reason", "rm_score?", "judge_score?"),
            *("turn_rewards?", "environment?", "show?"),
        ),
        writes=("token_level_scores",),
        leader_only=True,
        reentrant=True,
    )
    def score(self, batch: DataProto) -> DataProto:
        scores = (batch.samples["row"] % 2).astype(np.float32)
        samples = {"score": scores, "acc": scores, "extras": np.array([{"acc": 1.0} for _ in scores], object)}
        lengths = batch.fetch("response_mask").lengths
        return DataProto({"token_level_scores": column(lengths, np.float32)}, samples, {"metrics": {"s": Sum(1.0)}})


class RefitReport(NamedTuple):
    """The fields of `hpcrl.engine.refit.refit.RefitReport`, whose file imports torch."""

    seconds: float = 1.0
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_copied: int = 0
    bytes_aliased: int = 0
    peak_extra_bytes: int = 0
    checksum_seconds: float = 0.0


class RefitStub(Worker):
    """Registered as `hpcrl.workers.weight_transfer.RefitWorker`."""

    @register(Dispatch.ONE_TO_ALL)
    def update_weights(self) -> RefitReport:
        return RefitReport()


STUBS: dict[str, type[Worker]] = {
    "actor": ActorStub,
    "ref": RefStub,
    "critic": CriticStub,
    "rollout": RolloutStub,
    "scorer": ScorerStub,
    "refit": RefitStub,
}


def written(batch: DataProto, *names: str) -> DataProto:
    """Float columns with an entry for each response token."""
    lengths = batch.fetch("response_mask").lengths
    return DataProto({name: column(lengths, np.float32) for name in names}, {}, {"metrics": metrics(names[0])})


@dataclass(frozen=True)
class Case:
    algorithm: str
    samples: int
    tokens: int  # of the longest sample
    steps: int  # that are measured, after one that is not


@dataclass(frozen=True)
class Measured:
    """Rank 0's part of a step, the median of the steps. cpu_s: its CPU seconds; waiting_cpu_s: those of the tests in
    its waits, which are in `cpu_s`. sent, received: bytes of commands out and of results in. row_bytes: bytes of
    columns between all ranks. rank_0_row_bytes: those in and out of rank 0, which is a leader as well."""

    algorithm: str
    ranks: int
    samples: int
    tokens: int
    cpu_s: float
    waiting_cpu_s: float
    wall_s: float
    sent: float
    received: float
    row_bytes: float
    rank_0_row_bytes: float


class BenchRun:
    """What a job's loop uses of `hpcrl.run.run.Run`, without files."""

    def __init__(self, controller: Controller, job: Train, total_steps: int) -> None:
        from hpcrl.observe.record.progress import PhaseTimers
        from hpcrl.run.performance import Stragglers

        self.controller, self.job, self.config, self.total_steps = controller, job, job.config, total_steps
        self.timers = PhaseTimers(announce=controller.phase)
        self.stragglers = Stragglers(controller, Path(job.config.run.dir), waits=True)
        self.metrics: dict[str, float] = {}
        self.calls: list[Call] = []
        self.seen: list[dict[str, float]] = []  # of each step

    def roles(self, *names: str) -> list[Any]:
        from hpcrl.run.calls import Role

        return [Role(cast("Run", self), self.controller.groups.get(name)) for name in names]

    def steps(self) -> Iterator[int]:
        for step in range(1, self.total_steps + 1):
            self.metrics, self.calls = {}, []
            began = clocks()
            yield step
            self.wait()
            self.metrics |= self.controller.collect_traffic() | self.stragglers.observe(step)
            self.timers.collect()
            spent = {
                name: after - before for (name, after), before in zip(clocks().items(), began.values(), strict=True)
            }
            self.seen.append(self.metrics | spent)

    def log(self, found: dict[str, float]) -> None:
        self.metrics |= found

    def wait(self) -> None:
        while self.calls:
            self.calls.pop(0).get()

    def archive(self, batch: Any) -> None:
        samples = batch.get().samples
        self.wait()
        lengths = (samples["prompt_length"] + samples["response_length"]).tolist()
        self.log({"perf/total_num_tokens": float(sum(lengths))})

    def begin_update(self) -> None: ...

    def stops_before(self, *phases: str) -> bool:
        return False

    cannot_begin = stops_before


def clocks() -> dict[str, float]:
    return {"cpu_s": time.process_time(), "waiting_cpu_s": wait_time.cpu_seconds, "wall_s": time.perf_counter()}


def make_job(case: Case, size: int) -> Train:
    """The job of `hpcrl train`, without prompts."""
    from hpcrl.algorithms.kl import KLController
    from hpcrl.data.sampler import OrderedSampler
    from hpcrl.jobs.train import Train

    prompts = case.samples // RESPONSES
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "bench.yaml")
        path.write_text(
            CONFIG.format(
                folder=folder,
                prompts=prompts,
                mini_batch=prompts // MINI_BATCHES,
                prompt=case.tokens // 2,
                response=case.tokens // 2,
                longest=case.tokens,
                n=RESPONSES,
                estimator=ALGORITHMS[case.algorithm],
                steps=case.steps + 1,
            )
        )
        config = Train.prepare(Train.read_config(str(path)))
    job = Train(cast("World", None), config, Train.check(config, size), argparse.Namespace())
    job.sampler = OrderedSampler(10 * prompts, seed=1, shuffle=True)
    job.kl_controller = KLController(config.algorithm.kl_ctrl)
    return job


def layouts_of(job: Train) -> dict[str, Layout]:
    found = {role: Layout(**placed.grid) for role, placed in job.derived.roles.items()}
    return found | {"scorer": found["rollout"], "refit": found["rollout"]}


def measure(world: World, case: Case, profile: cProfile.Profile | None = None) -> Measured | None:
    """Run the steps of a case; what rank 0 has measured, None on other ranks. Collective."""
    job = make_job(case, world.size) if world.rank == 0 else None
    layouts: dict[str, Layout] = world.broadcast_object(layouts_of(job) if job is not None else None)
    workers = {
        role: RolloutStub(layout, world.rank, case.tokens) if role == "rollout" else STUBS[role](layout, world.rank)
        for role, layout in layouts.items()
        if world.rank in layout
    }

    def program(controller: Controller) -> list[dict[str, float]]:
        from hpcrl.run.rollouts.choice import make_rollout_source

        assert job is not None
        run = BenchRun(controller, job, case.steps + 1)
        tokenizer = SimpleNamespace(eos_token_id=0, name_or_path="")
        job.rollouts = make_rollout_source(cast("Run", run), job.derived, job.sampler, tokenizer)
        job.rollouts.weights.update_to(0)
        if profile is not None:
            profile.enable()
        job.loop(cast("Run", run))
        if profile is not None:
            profile.disable()
        return run.seen

    steps = run_program(world, workers, STUBS, layouts, program)
    return summary(case, world.size, steps[1:]) if steps is not None else None


def summary(case: Case, ranks: int, steps: Sequence[dict[str, float]]) -> Measured:
    def median(*names: str) -> float:
        return float(np.median([sum(step.get(name, 0.0) for name in names) for step in steps]))

    sent, received = median("perf/controller_bytes_sent"), median("perf/controller_bytes_received")
    moved = [name for name in steps[0] if name.startswith("perf/bytes/")]
    return Measured(
        **{name: getattr(case, name) for name in ("algorithm", "samples", "tokens")},
        ranks=ranks,
        **{name: median(name) for name in ("cpu_s", "waiting_cpu_s", "wall_s")},
        sent=sent,
        received=received,
        row_bytes=median(*moved),
        rank_0_row_bytes=median("perf/rank_0_bytes_sent", "perf/rank_0_bytes_received") - sent - received,
    )


def serve(arguments: argparse.Namespace) -> None:
    """One rank's part of the cases of one number of ranks. Rank 0 writes the results to a file."""
    comm = start_mpi()
    device = cast("Any", SimpleNamespace(type="cpu"))
    world = World(comm.rank, comm.size, comm, comm.rank, comm.size, 1, device, cast("Any", None))
    if comm.rank:  # hundreds of ranks on a few cores: those that wait for commands leave the cores to rank 0
        back_off.eager_tests, back_off.last_pause = 10, 20e-3
    profile = cProfile.Profile(time.process_time) if arguments.profile and world.rank == 0 else None
    rows = [measure(world, case, profile) for case in cases_of(arguments)]
    loaded = world.all_gather_object([name for name in FORBIDDEN if name in sys.modules])
    memory = world.all_gather_object(proportional_set_size())
    if world.rank == 0:
        result = {
            "measured": [asdict(measured) for measured in rows if measured is not None],
            "imported": sorted({name for names in loaded for name in names}),
            "rank_mb": float(np.median(memory)) / 1e6,
            "rank_0_mb": memory[0] / 1e6,
            "all_mb": sum(memory) / 1e6,
        }
        Path(arguments.result).write_text(json.dumps(result))
    if profile is not None:
        import pstats

        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(PROFILED)
    finish(0)


def proportional_set_size() -> int:
    """Bytes of this process's memory; pages that n processes share count as 1/n."""
    with open("/proc/self/smaps_rollup") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("Pss:"))


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    return [
        Case(algorithm, samples, tokens, arguments.steps)
        for algorithm in arguments.algorithms
        for samples in arguments.samples
        for tokens in arguments.tokens
    ]


@dataclass(frozen=True)
class Planned:
    """CPU seconds and bytes of rank 0 for a step of so many samples: the assignment to replicas, then the commands of a
    call whose columns move from the rollout's leaders to those of the actor."""

    samples: int
    assignment_s: float
    commands_s: float
    command_bytes: int


def plan_step(config: Config, derived: Derived, samples: int) -> Planned:
    """Plan a step without ranks. Lengths are uniform at random."""
    from hpcrl.run.rollouts.choice import assign_to_replicas

    n, data = config.rollout.n, config.data
    generator, num_prompts = np.random.default_rng(0), samples // n
    lengths = [generator.integers(1, most + 1, samples) for most in (data.max_prompt_length, data.max_response_length)]
    prompt = np.repeat(np.arange(num_prompts, dtype=np.int32), n)
    columns = {"prompt_length": lengths[0], "response_length": lengths[1], "prompt": prompt}
    batch = DataProto({}, columns, {"num_prompts": num_prompts, "step": 1})
    began = time.process_time()
    assign_to_replicas(batch, config, derived)
    assigned = time.process_time()
    actor, rollout = derived.roles["actor"], derived.roles["rollout"]
    owner = np.repeat(np.array(rollout.leaders, np.int32), -(-samples // rollout.dp))[:samples]
    destination = np.array(actor.leaders, np.int32)[batch.samples[replica_column(actor.dp)]]
    reads = [Read(name, Location.of_block(Block(1), owner)) for name in ("input_ids", "response_mask", "log_probs")]
    shares = Shares(reads, destination)
    owners = {*rollout.leaders, *actor.ranks}
    command = Command(1, "actor", "compute_log_prob", reports=True)
    nbytes = sum(len(pickle.dumps(replace(command, share=shares.of(rank)), protocol=5)) for rank in owners)
    return Planned(samples, assigned - began, time.process_time() - assigned, nbytes)


def report_plan(path: str, overrides: Sequence[str]) -> int:
    """Print the times of one step of the template, and of steps of other sizes."""
    from hpcrl.jobs.train import Train

    config = Train.prepare(Train.read_config(path, overrides))
    derived = Train.check(config, config.job.nodes * config.job.ntasks_per_node)
    print(f"{derived.world_size} ranks; data-parallel sizes {sorted({role.dp for role in derived.roles.values()})}")
    for samples in sorted({derived.samples_per_step, 8192, 65536}):
        prompts = samples // config.rollout.n
        plan = plan_step(of_size(config, prompts), derived, samples)
        print(
            f"{samples:>6} samples: assignment {plan.assignment_s:.2f} s, commands of a call {plan.commands_s:.2f} s "
            f"and {plan.command_bytes / 1e6:.2f} MB"
        )
    return 0


def of_size(config: Config, prompts: int) -> Config:
    """The config with steps of so many prompts, and mini-batches in proportion."""
    mini_batch = max(1, config.actor.ppo_mini_batch_size * prompts // config.data.train_batch_size)
    data = config.data.model_copy(update={"train_batch_size": prompts})
    actor = config.actor.model_copy(update={"ppo_mini_batch_size": mini_batch})
    return config.model_copy(update={"data": data, "actor": actor})


def launch(arguments: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Run the cases on so many ranks of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = on_ranks(ranks, Path(__file__).parent, "controller", "--result", result)
        for name in ("algorithms", "samples", "tokens"):
            command += [f"--{name}", *map(str, getattr(arguments, name))]
        command += ["--steps", str(arguments.steps)]
        subprocess.run(command + ["--profile"] * arguments.profile, env=with_threads(1), stdout=2, check=True)
        return dict(json.loads(result.read_text()))


def slopes(rows: Sequence[Measured], name: str) -> dict[str, float]:
    """Exponents a and b of c x ranks^a x samples^b, by least squares of logarithms; NaN without several values."""
    axes = [axis for axis in ("ranks", "samples") if len({getattr(row, axis) for row in rows}) > 1]
    logs = [[math.log(getattr(row, axis)) for axis in axes] + [1.0] for row in rows]
    values = [math.log(max(getattr(row, name), 1e-9)) for row in rows]
    fitted = np.linalg.lstsq(np.array(logs), np.array(values), rcond=None)[0]
    return dict.fromkeys(("ranks", "samples"), math.nan) | dict(zip(axes, fitted.tolist(), strict=False))


SHOWN = {
    "cpu_s": "CPU s",
    "waiting_cpu_s": "of waits",
    "sent": "MB sent",
    "received": "MB received",
    "row_bytes": "MB of columns, all ranks",
}


def table(rows: Sequence[Measured]) -> Iterator[str]:
    yield "| | ranks | samples | tokens | " + " | ".join(SHOWN.values()) + " |"
    yield "|---|" + "---:|" * (3 + len(SHOWN))
    for row in rows:
        numbers = (
            f"{value:.3f}" if name.endswith("_s") else f"{value / 1e6:.2f}"
            for name, value in ((name, getattr(row, name)) for name in SHOWN)
        )
        yield f"| {row.algorithm} | {row.ranks} | {row.samples:,} | {row.tokens:,} | " + " | ".join(numbers) + " |"


def slope_lines(rows: Sequence[Measured]) -> Iterator[str]:
    for algorithm in dict.fromkeys(row.algorithm for row in rows):
        own = [row for row in rows if row.algorithm == algorithm]
        for name in ("cpu_s", "sent", "received"):
            found = slopes(own, name)
            yield f"{algorithm}: {SHOWN[name]} ~ ranks^{found['ranks']:.2f} x samples^{found['samples']:.2f}"


def report(results: Iterable[dict[str, Any]], path: str | None) -> int:
    """Print the table; returns the exit code."""
    outputs = list(results)
    names = {field.name for field in fields(Measured)}
    rows = [Measured(**{name: row[name] for name in names}) for result in outputs for row in result["measured"]]
    rows.sort(key=lambda row: (row.algorithm, row.samples, row.tokens, row.ranks))
    print(*table(rows), "", *slope_lines(rows), sep="\n")
    memory = max(outputs, key=lambda result: result["all_mb"])
    print(
        f"memory: {memory['rank_mb']:.0f} MB of a rank, {memory['rank_0_mb']:.0f} MB of rank 0, "
        f"{memory['all_mb'] / 1e3:.1f} GB of all"
    )
    if path is not None:
        Path(path).write_text(
            json.dumps(
                {
                    "results": outputs,
                    "slopes": {
                        algorithm: {
                            name: slopes([row for row in rows if row.algorithm == algorithm], name) for name in SHOWN
                        }
                        for algorithm in dict.fromkeys(row.algorithm for row in rows)
                    },
                },
                indent=1,
            )
        )
    imported = sorted({name for result in outputs for name in result["imported"]})
    if imported:
        print(f"ranks have imported {', '.join(imported)}; expected none of {', '.join(FORBIDDEN)}", file=sys.stderr)
        return 1
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 64, 128, 256])
    parser.add_argument("--samples", type=int, nargs="+", default=[1024, 8192, 65536])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64], help="of the longest sample; multiples of 16")
    parser.add_argument("--steps", type=int, default=3, help="steps that are measured")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--profile", action="store_true", help="print where rank 0's time is spent")
    parser.add_argument("--plan", nargs="+", metavar=("CONFIG", "key=value"))
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--result", help=argparse.SUPPRESS)  # a rank of one job


def main(arguments: argparse.Namespace) -> int:
    if arguments.result is not None:
        serve(arguments)
    if arguments.plan is not None:
        return report_plan(arguments.plan[0], arguments.plan[1:])
    return report((launch(arguments, ranks) for ranks in arguments.ranks), arguments.json)
