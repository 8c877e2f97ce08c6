"""`hpcrl plan --refit CONFIG [key=value ...]`: what one refit of a job moves, and the memory that it takes.

The job is as large as `job.nodes` x `job.ntasks_per_node` says; nothing of it runs. Pure arithmetic on one core.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from hpcrl.config.derive import JobDescription
from hpcrl.config.placement import place
from hpcrl.config.roles import ACTOR, ROLLOUT, shares_weights
from hpcrl.config.schema import Config, ModelConfig
from hpcrl.config.yaml_core import ConfigError
from hpcrl.engine.refit.planner import RankTraffic, Resharding
from hpcrl.forecast.memory.state import ITEMSIZE
from hpcrl.model.architecture import shape_from_yaml, with_training
from hpcrl.model.params import role_layout, shards
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.launcher import format_spans

NAMED = 4  # ranks that a row names


@dataclass(frozen=True)
class Question:
    """A job's refit: the resharding between its two roles."""

    config: Config
    resharding: Resharding

    @property
    def aliases(self) -> bool:
        """Whether the engine shares weights with the actor instead of having its own."""
        rollout, dtypes = self.config.rollout, (None, self.config.model.dtype)
        return shares_weights(self.config) and rollout.engine == "native" and rollout.dtype in dtypes


def question(config: Config) -> Question:
    """The refit of a job. Raises ConfigError or InputError, one line, for invalid layouts."""
    world_size = config.job.nodes * config.job.ntasks_per_node
    roles = place(config, [ACTOR, ROLLOUT], world_size)
    shape = job_shape(config)
    resharding = Resharding(
        shape,
        role_layout(shape, "actor", **roles["actor"].grid),
        role_layout(shape, "rollout", **roles["rollout"].grid),
        ITEMSIZE[config.rollout.dtype or config.model.dtype],
        nodes=tuple(rank // config.job.ntasks_per_node for rank in range(world_size)),
        destination_format="tensorrt_llm" if config.rollout.engine == "tensorrt_llm" else "megatron",
    )
    return Question(config, resharding)


def describe(job: JobDescription, path: str, overrides: Sequence[str] = ()) -> list[str]:
    """The lines of the table."""
    asked = question(job.read_config(path, overrides))
    start = time.perf_counter()
    traffic = asked.resharding.traffic()
    totals = time.perf_counter() - start
    busiest = max(traffic, key=lambda rank: traffic[rank].sent + traffic[rank].received)
    start = time.perf_counter()
    question(asked.config).resharding.plan_for_rank(busiest)
    share = time.perf_counter() - start
    return [
        *_heading(path, asked),
        "",
        *_table(asked, traffic),
        "",
        *_summary(asked, traffic),
        f"  {'planned in':<22}{share:.2f} s for the share of rank {busiest}, {totals:.2f} s for this table",
    ]


def _heading(path: str, asked: Question) -> list[str]:
    config, shape, itemsize = asked.config, asked.resharding.shape, asked.resharding.itemsize
    parameters = sum(math.prod(shard.global_shape) for shard in shards(shape))
    job = config.job
    dtypes = config.model.dtype, config.rollout.dtype or config.model.dtype
    lines = [
        f"refit of {path}: {job.nodes * job.ntasks_per_node} ranks, {job.nodes} nodes of {job.ntasks_per_node}",
        f"  model    {shape.num_layers} layers, {parameters / 1e9:.3g} B parameters, {size(parameters * itemsize)} in "
        f"{dtypes[1]}",
    ]
    for name, role, dtype, kind in (
        ("actor", asked.resharding.source, dtypes[0], "megatron"),
        ("rollout", asked.resharding.destination, dtypes[1], f"engine {config.rollout.engine}"),
    ):
        layout = f"tp {role.tp}  pp {role.pp}  dp {role.dp}"
        lines.append(f"  {name:<8} {layout}  ranks {format_spans(role.ranks)}, {dtype}, {kind}")
    return lines


def _table(asked: Question, traffic: dict[int, RankTraffic]) -> list[str]:
    resharding = asked.resharding
    shared = {rank: sum(its.nbytes for its in resharding.shared(rank)) if asked.aliases else 0 for rank in traffic}
    rows: list[tuple[str, dict[int, int]]] = [
        ("sent", {rank: its.sent for rank, its in traffic.items()}),
        ("received", {rank: its.received for rank, its in traffic.items()}),
        ("least to receive", {rank: its.received for rank, its in traffic.items()}),
        ("copied on the rank", {rank: its.copied - shared[rank] for rank, its in traffic.items()}),
        ("aliased", shared),
        ("engine's own weights", {rank: its.received + its.copied - shared[rank] for rank, its in traffic.items()}),
    ]
    lines = [f"  {'per rank':<22}{'min':>10}{'mean':>10}{'max':>10}  ranks with the most"]
    for name, values in rows:
        most = max(values.values())
        worst = [rank for rank, value in values.items() if value == most]
        named = "-" if not most else "all" if len(worst) == len(values) else _ranks(worst)
        numbers = (min(values.values()), fmean(values.values()), most)
        lines.append(f"  {name:<22}{''.join(f'{size(number):>10}' for number in numbers)}  {named}")
    return lines


def _summary(asked: Question, traffic: dict[int, RankTraffic]) -> list[str]:
    resharding, bucket = asked.resharding, asked.config.rollout.checkpoint_engine.update_weights_bucket_megabytes
    moved = sum(its.received for its in traffic.values())
    sent = [[traffic[rank].sent for rank in replicas] for replicas in resharding.source.groups("cp", "dp")]
    unevenness = max((max(each) / fmean(each) for each in sent if any(each)), default=1.0)
    most = max(its.sent + its.received for its in traffic.values())
    peak = f"at most {bucket} MiB" if most > bucket * 2**20 else size(most)
    return [
        f"  {'moved over all ranks':<22}{size(moved)}, of it {size(resharding.cross_node_bytes())} between nodes, "
        "the least possible",
        f"  {'largest sender':<22}{unevenness:.3f} x the mean of the ranks that hold the same",
        f"  {'peak extra memory':<22}{peak} per rank, besides the weights (update_weights_bucket_megabytes={bucket})",
    ]


def job_shape(config: Config) -> ModelShape:
    """The policy's shape, from its Hugging Face directory if the config names one."""
    model, num_tokens = config.model, 0
    if model.path is None and model.vocab_size is None:
        if model.tokenizer is None:
            raise ConfigError("model.vocab_size and model.tokenizer are null; name one, the weights depend on it")
        # takes seconds, and most large templates name vocab_size
        from hpcrl.data.tokenizer import load_tokenizer, token_ids

        num_tokens = max(token_ids(load_tokenizer(model.tokenizer))) + 1
    return model_shape(model, num_tokens)


def model_shape(model: ModelConfig, num_tokens: int) -> ModelShape:
    """The shape of a section `model:`, of a Hugging Face directory without a look at its weights."""
    if model.path is None:
        return with_training(shape_from_yaml(model, num_tokens), model)
    from hpcrl.model.families.config_json import read_shape

    return with_training(read_shape(Path(model.path)), model)


def _ranks(ranks: Sequence[int]) -> str:
    """The first ranks, and the number of the others."""
    more = len(ranks) - NAMED
    return ", ".join(map(str, ranks[:NAMED])) + (f" and {more} more" if more > 0 else "")


def size(nbytes: float) -> str:
    """A size in units of powers of 1000."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes:.0f} B"
