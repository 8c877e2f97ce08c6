"""What each phase of a training job's step costs, by the name of its `timing_s/<phase>`, on ranks of its own."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from hpcrl.config.roles import JUDGE, Part
from hpcrl.config.schema import RecomputeConfig
from hpcrl.forecast.memory.generation import GIB, EngineMemory
from hpcrl.forecast.memory.memory import NEEDED, Phase, TrainingPlan
from hpcrl.forecast.memory.state import FP32
from hpcrl.forecast.time.cost import Cost, Moved, Network, Units, group_of, refit_cost, refit_shares
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.passes import ENGINE, GRAPH, PassModel, Recompute, numbers_of, stages_of
from hpcrl.forecast.time.samples import (
    Engine,
    Optimizer,
    Passes,
    Update,
    Work,
    computations_of,
    copied_cost,
    evenness,
    forward_cost,
    generation_cost,
    least_states,
    update_cost,
)
from hpcrl.machine.machine_file import Dtype, Machine
from hpcrl.model.shape import ModelShape

COLUMNS = 8  # of a response's tokens, in fp32, that advantages read or write, and that an archive has
ADVANTAGE_OPERATORS = 60
TOKEN = 4  # bytes in an archive
DTYPES: dict[int, Dtype] = {4: "float32", 2: "bfloat16"}


class Timed(NamedTuple):
    """A phase, its role's ranks, and its cost on the rank with most work. evenness: the mean rank's work as a share of
    it."""

    name: str
    role: str
    kind: str
    ranks: tuple[int, ...]
    cost: Cost
    evenness: float = 1.0

    @property
    def demand(self) -> float:
        """Cores that a rank needs in the mean: while it waits for another one it needs none."""
        seconds = self.cost.seconds
        return self.cost.busy / seconds * self.evenness if seconds > 0 else 1.0


@dataclass(frozen=True)
class JobTimes:
    """The costs of a job's phases on a machine, before its efficiency. resident_beside: bytes of other models on the
    engine's ranks while it generates; None: those of the job."""

    job: TrainingPlan
    machine: Machine
    lengths: Lengths
    resident_beside: int | None = None

    @cached_property
    def network(self) -> Network:
        return Network.of(self.machine, self.ranks_per_node)

    @property
    def ranks_per_node(self) -> int:
        return self.job.config.job.ntasks_per_node

    @property
    def on_gpu(self) -> bool:
        return self.machine.device.kind == "gpu"

    def phases(self) -> list[Timed]:
        """In the order of a step; a save is one phase, with what it takes each step in the mean."""
        return [*self.without_saves(), *self.saves()]

    def without_saves(self) -> list[Timed]:
        found, costs = list[Timed](), {"generate": self._generated, "forward": self._forward, "train": self._update}
        for phase in self.job.phases:
            ranks, actor = self._ranks(phase.role), self._ranks("actor")
            if phase.kind == "train" and all(it.kind != "train" for it in found):
                found.append(Timed("adv", "actor", "forward", actor, self._advantages()))
            if phase.kind in costs:
                name, cost = "gen" if phase.name == "rollout" else phase.name, costs[phase.kind](phase)
                found.append(Timed(name, phase.role, phase.kind, ranks, cost, self._evenness(phase)))
            if phase.name == "rollout" and self.job.derived.needs_reward_baseline:
                found.append(Timed("gen_max", phase.role, phase.kind, ranks, self._greedy()))
            if phase.kind == "refit":
                ranks = tuple(sorted({*ranks, *actor}))
                found.append(Timed("update_weights", phase.role, phase.kind, ranks, self._refit()))
        return found

    def saves(self) -> list[Timed]:
        found = []
        if self.job.config.trainer.save_rollouts:
            actor = self._ranks("actor")
            found.append(Timed("dump_rollout_generations", "actor", "save", actor, self._archive()))
        if self.job.config.trainer.save_freq > 0:
            found.append(Timed("save_checkpoint", "actor", "save", self._saving_ranks(), self._save()))
        return found

    def _ranks(self, role: str) -> tuple[int, ...]:
        return self.job.derived.roles[role].ranks

    def _saving_ranks(self) -> tuple[int, ...]:
        trained = [self._ranks(role) for role, model in self.job.models.items() if model.optim is not None]
        return tuple(sorted({rank for ranks in trained for rank in ranks}))

    def pass_model(self, role: str, phase: Phase | None = None) -> PassModel:
        """A role's model as a phase runs it."""
        model, config, work = self.job.models[role], self.job.config, phase.work if phase else None
        dtype, itemsize = DTYPES[model.itemsize], model.itemsize
        device, fp8 = self.machine.device, config.model.transformer_engine.fp8
        head_units = Units.of(device, dtype, itemsize)
        return PassModel(
            shape=model.shape,
            layout=model.layout,
            head=model.head,
            units=Units.of(device, "float8", itemsize) if fp8 and self.on_gpu else head_units,
            head_units=head_units,
            network=self.network,
            ranks_per_node=self.ranks_per_node,
            sequence_parallel=model.sequence_parallel,
            lora=model.lora,
            recompute=_recompute(work.recompute) if phase is not None and phase.kind == "train" and work else None,
            recomputes_head=work is None or work.chunk_tokens is not None,
            load_imbalance=self.job.specs[role].architecture(config).moe.load_imbalance or 1.0,
        )

    def passes(self, phase: Phase) -> Passes:
        """The samples of a pass over a step, or of one optimizer step."""
        config, derived = self.job.config, self.job.derived
        samples = derived.samples_per_step
        if phase.kind == "train":
            count = self.updates(phase)
            epochs = derived.critic_ppo_epochs if phase.name == "update_critic" else config.actor.ppo_epochs
            samples = math.ceil(samples * epochs / count)
        spec = self.job.specs[phase.role]
        head = self.job.models[phase.role].head
        return Passes(samples, spec.token_budget(config), config.trainer.balance_batch, head != "reward")

    def updates(self, phase: Phase) -> int:
        """Optimizer steps of a step."""
        derived = self.job.derived
        return derived.critic_updates_per_step if phase.name == "update_critic" else derived.actor_updates_per_step

    def _forward(self, phase: Phase) -> Cost:
        model = self.pass_model(phase.role, phase)
        return forward_cost(model, self.passes(phase), self.lengths) + self.copied(phase, self.job.away(phase.role))

    def _update(self, phase: Phase) -> Cost:
        model, config = self.pass_model(phase.role, phase), self.job.config
        optimizer, ddp = Optimizer.of(self.job.models[phase.role], model.units.itemsize), config.model.ddp
        overlaps = self.on_gpu and model.layout.dp * model.layout.cp > 1
        reduces = overlaps if ddp.overlap_grad_reduce is None else ddp.overlap_grad_reduce
        may_gather = overlaps and optimizer.is_divided and model.lora is None
        gathers = may_gather if ddp.overlap_param_gather is None else ddp.overlap_param_gather
        update = Update(optimizer, self.updates(phase), reduces, gathers)
        cost = update_cost(model, self.passes(phase), update, self.lengths)
        return cost + self.copied(phase, self.job.away(phase.role))

    def _evenness(self, phase: Phase) -> float:
        """1 on machines whose ranks share no cores, where it is not used."""
        if self.machine.node.cores is None or phase.work is None:
            return 1.0
        trains = phase.kind == "train"
        return evenness(self.pass_model(phase.role, phase), self.passes(phase), self.lengths, trains=trains)

    def copied(self, phase: Phase, away: Collection[Part]) -> Cost:
        """Copies of a call, for which what is `away` of its role comes to the device, and back after it."""
        host_copy = self.machine.node.host_copy
        if phase.role == JUDGE.name:
            judge = self.job.judge
            assert judge is not None
            return Cost(copies=2.0 * judge.weights * ("parameters" in away) / host_copy)
        moved = tuple(part for part in NEEDED[phase.kind] if part in away and part != "gradients")
        return copied_cost(self.pass_model(phase.role, phase), moved, self._optimizer(phase.role), host_copy)

    def _optimizer(self, role: str) -> Optimizer | None:
        model = self.job.models[role]
        return None if model.optim is None else Optimizer.of(model, model.itemsize)

    # generation

    @cached_property
    def engine(self) -> Engine:
        return self._engine_of(self.job.engine)

    def _engine_of(self, memory: EngineMemory) -> Engine:
        replays = not memory.cfg.enforce_eager
        units = Units.of(self.machine.device, DTYPES[memory.itemsize], memory.itemsize, replays=replays)
        fixed, operators = (units, units, self.network, self.ranks_per_node), GRAPH if units.replays else ENGINE
        model = PassModel(memory.shape, memory.layout, "lm", *fixed, sequence_parallel=False, operators=operators)
        return Engine(model, memory.cfg.max_num_batched_tokens)

    @cached_property
    def work(self) -> Work:
        """The sequences of an engine."""
        rollout, derived = self.job.config.rollout, self.job.derived
        prompts = self._sequences / (rollout.n if rollout.enable_prefix_caching else 1)
        return Work(self._sequences, prompts, derived.samples_per_step, self._slots(rollout.max_num_seqs))

    @property
    def _sequences(self) -> int:
        """Of an engine in a step."""
        return math.ceil(self.job.derived.samples_per_step / self.job.layouts["rollout"].dp)

    def _generated(self, phase: Phase) -> Cost:
        if phase.role == JUDGE.name:
            return self._judged(phase)
        if (running := self.steady) is not None:
            return self.engine.steadily(self.work, self.lengths, min(self.work.slots, running))
        return generation_cost(self.engine, self.work, self.lengths)

    @property
    def steady(self) -> int | None:
        """Sequences of an engine that may be under way in generation that never stops; None: it stops each step."""
        cfg = self.job.config.async_training
        if cfg.mode != "bounded_staleness" or cfg.staleness_threshold == 0 or not cfg.partial_rollout:
            return None
        return self._sequences * (1 + cfg.staleness_threshold)

    def _greedy(self) -> Cost:
        """One response more per prompt."""
        each, n = self.work, self.job.config.rollout.n
        sequences = math.ceil(each.total / n / self.job.layouts["rollout"].dp)
        return generation_cost(self.engine, Work(sequences, sequences, each.total // n, each.slots), self.lengths)

    def _judged(self, phase: Phase) -> Cost:
        """A question for each sample, whose answer has the largest length."""
        judge = self.job.judge
        assert judge is not None
        cfg, total = self.job.config.reward.judge, self.job.derived.samples_per_step
        sequences = math.ceil(total / judge.layout.dp)
        prompt = min(cfg.max_prompt_length, round(self.lengths.mean))
        lengths = Lengths.fixed(prompt, cfg.max_response_length)
        engine = self._engine_of(judge)
        cost = generation_cost(engine, Work(sequences, sequences, total, cfg.max_num_seqs), lengths)
        return cost + self.copied(phase, self.job.away(phase.role))

    def _slots(self, most: int) -> int:
        """Sequences that run at once: at most as the engine allows, and as the KV cache holds at their mean length."""
        model = self.engine.model
        cached = sum(count * it.cached_width for it, count in computations_of(model))
        each = self.lengths.mean * cached * model.units.itemsize
        return max(1, min(most, int(self._kv_cache() / each)))

    def _kv_cache(self) -> float:
        """Bytes, as `TrainingPlan` has them, from the weights of the fullest rank."""
        config, memory, capacity = self.job.config, self.machine.device.memory_gib, self.job.capacity
        if self.on_gpu and memory is not None:
            capacity = int(min(config.job.gpu_memory_gib, memory) * GIB)
        resident = int(self._resident()) if self.resident_beside is None else self.resident_beside
        if config.rollout.engine == "tensorrt_llm":
            resident += int(self.engine_bytes / self.engine.model.layout.tp)
        return float(self.job.engine.kv_cache(capacity, resident))

    def _resident(self) -> float:
        """Bytes of models that stay on the rollout's ranks while they generate, of the fullest stage of each."""
        job, rollout, total = self.job, set(self._ranks("rollout")), 0.0
        for role, model in job.models.items():
            if rollout.isdisjoint(model.layout.ranks):
                continue
            total += max(state.without(job.away(role)).total for state in least_states(model))
        return total

    @cached_property
    def engine_bytes(self) -> float:
        """Of the whole model in the engine's dtype."""
        shape = self.engine.model.shape
        return float(whole_numbers(shape) * self.engine.model.units.itemsize)

    # the rest

    def _refit(self) -> Cost:
        source, destination = self.job.layouts["actor"], self.job.layouts["rollout"]
        shares: tuple[Moved, ...] = refit_shares(source, destination, self.stage_shares(), self.ranks_per_node)
        busy = group_of(destination, self.ranks_per_node, "tp").busy
        bandwidth, aliases = self.machine.device.memory_bandwidth, self.job.aliases
        cost = refit_cost(shares, self.engine_bytes, self.network, bandwidth, busy, aliases=aliases)
        away = ("parameters",) if "parameters" in self.job.away("actor") else ()
        return cost + copied_cost(self.pass_model("actor"), away, None, self.machine.node.host_copy)

    def stage_shares(self) -> tuple[float, ...]:
        """Of the actor's weights, the share of each pipeline stage."""
        model = self.pass_model("actor")
        layout = model.layout
        whole = [it.dense * layout.tp + it.experts * layout.ep * layout.etp for it in model.numbers]
        return tuple(numbers / sum(whole) for numbers in whole)

    def _advantages(self) -> Cost:
        """Elementwise work on the responses' tokens, on one rank of each of the actor's replicas."""
        tokens = self.job.derived.samples_per_step * self.lengths.response / self.job.derived.roles["actor"].dp
        device = self.machine.device
        return Cost(
            memory=COLUMNS * FP32 * tokens / device.memory_bandwidth, launches=ADVANTAGE_OPERATORS * device.launch
        )

    def _archive(self) -> Cost:
        tokens = self.lengths.mean + COLUMNS * self.lengths.response
        return Cost(copies=self.job.derived.samples_per_step * tokens * TOKEN / self.machine.node.write)

    def _save(self) -> Cost:
        """What a save takes of each step: the loop waits for it, or only for the copy in host memory
        (trainer.checkpoint.async_save)."""
        trainer = self.job.config.trainer
        nbytes, ranks = sum(self.checkpoint_bytes().values()), len(self._saving_ranks())
        copied = nbytes / ranks / self.machine.node.host_copy
        return Cost(copies=(copied if trainer.checkpoint.async_save else self.writing()) / trainer.save_freq)

    def writing(self) -> float:
        """Seconds of a save, until it is in the file system. All nodes write at the same time."""
        return sum(self.checkpoint_bytes().values()) / self.machine.node.write / self._saving_nodes()

    def reading(self) -> float:
        """Seconds in which the nodes read a save."""
        return sum(self.checkpoint_bytes().values()) / self.machine.node.read / self._saving_nodes()

    def _saving_nodes(self) -> int:
        return max(1, len(self._saving_ranks()) // self.ranks_per_node)

    def checkpoint_bytes(self) -> dict[str, float]:
        """By role: weights and optimizer state of trained models."""
        found = {}
        for role, model in self.job.models.items():
            if (optimizer := self._optimizer(role)) is not None:
                numbers = numbers_of(model.shape, *stages_of(model.shape), 1, 1, 1, model.head, model.lora)
                copy = FP32 * (model.itemsize == FP32 and optimizer.is_divided)  # the optimizer's own, of fp32 weights
                found[role] = numbers.all * model.itemsize + optimizer.nbytes(numbers) + copy * numbers.trained
        return found


def _recompute(config: RecomputeConfig | None) -> Recompute | None:
    if config is None or config.granularity is None:
        return None
    return Recompute(config.granularity, config.method, config.num_layers, tuple(config.modules))


@lru_cache(maxsize=64)
def whole_numbers(shape: ModelShape) -> int:
    """Weights of the whole model."""
    return numbers_of(shape, *stages_of(shape), 1, 1, 1).all
