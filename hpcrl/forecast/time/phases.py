"""What each phase of a training job's step costs, by the name of its `timing_s/<phase>`, on ranks of its own."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from hpcrl.config.roles import JUDGE, Part
from hpcrl.forecast.memory.generation import GIB, EngineMemory
from hpcrl.forecast.memory.memory import NEEDED, Phase, TrainingPlan
from hpcrl.forecast.memory.state import FP32, RESPONSE_COLUMNS
from hpcrl.forecast.time import samples
from hpcrl.forecast.time.cost import NOTHING, Cost, Moved, Network, Units, group_of, refit_cost, refit_shares
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.passes import ENGINE, GRAPH, PassModel, Recompute, numbers_of, stages_of
from hpcrl.machine.machine_file import Dtype, Machine
from hpcrl.model.shape import ModelShape

ADVANTAGE_OPERATORS = 60
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
        cost, seconds = self.cost, self.cost.seconds
        return (seconds - cost.bubble - cost.waiting) / seconds * self.evenness if seconds > 0 else 1.0


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
        phases, trainer = self.without_saves(), self.job.config.trainer
        if trainer.save_rollouts:
            actor = self._ranks("actor")
            phases.append(Timed("dump_rollout_generations", "actor", "save", actor, self._archive()))
        if trainer.save_freq > 0:
            phases.append(Timed("save_checkpoint", "actor", "save", self._saving_ranks(), self._save()))
        return phases

    def without_saves(self) -> list[Timed]:
        timed, costs = list[Timed](), {"generate": self._generated, "forward": self._forward, "train": self._update}
        for phase in self.job.phases:
            ranks, actor = self._ranks(phase.role), self._ranks("actor")
            if phase.kind == "train" and all(it.kind != "train" for it in timed):
                timed.append(Timed("adv", "actor", "forward", actor, self._advantages()))
            if phase.kind in costs:
                name = "gen" if phase.name == "rollout" else phase.name
                cost = costs[phase.kind](phase) + self.copied(phase, self.job.away(phase.role))
                timed.append(Timed(name, phase.role, phase.kind, ranks, cost, self._evenness(phase)))
            if phase.name == "rollout" and self.job.derived.needs_reward_baseline:
                timed.append(Timed("gen_max", phase.role, phase.kind, ranks, self._greedy()))
            if phase.kind == "refit":
                ranks = tuple(sorted({*ranks, *actor}))
                timed.append(Timed("update_weights", phase.role, phase.kind, ranks, self._refit()))
        return timed

    def _ranks(self, role: str) -> tuple[int, ...]:
        return self.job.derived.roles[role].ranks

    def _saving_ranks(self) -> tuple[int, ...]:
        trained = [self._ranks(role) for role, model in self.job.models.items() if model.optim is not None]
        return tuple(sorted({rank for ranks in trained for rank in ranks}))

    def pass_model(self, role: str, phase: Phase | None = None) -> PassModel:
        """A role's model as a phase runs it."""
        model, config, work = self.job.models[role], self.job.config, phase.work if phase else None
        device, itemsize = self.machine.device, model.itemsize
        units = Units.of(device, DTYPES[itemsize], itemsize)
        large_units = Units.of(device, "float8", itemsize) if model.fp8 and self.on_gpu else units
        again = work.recompute if work is not None and phase is not None and phase.kind == "train" else None
        recompute = None
        if again is not None and again.granularity is not None:
            recompute = Recompute(again.granularity, again.method, again.num_layers, tuple(again.modules))
        fixed = model.shape, model.layout, model.head, units, large_units, self.network, self.ranks_per_node
        return PassModel(
            *fixed,
            sequence_parallel=model.sequence_parallel,
            lora=model.lora,
            recompute=recompute,
            recomputes_head=work is None or work.chunk_tokens is not None,
            load_imbalance=self.job.specs[role].architecture(config).moe.load_imbalance or 1.0,
            row_multiple=model.row_multiple,
        )

    def passes(self, phase: Phase) -> samples.Passes:
        """The samples of a pass over a step, or of one optimizer step."""
        config, derived = self.job.config, self.job.derived
        count = derived.samples_per_step
        if phase.kind == "train":
            epochs = derived.critic_ppo_epochs if phase.name == "update_critic" else config.actor.ppo_epochs
            count = math.ceil(count * epochs / self.updates(phase))
        budget, head = self.job.specs[phase.role].token_budget(config), self.job.models[phase.role].head
        return samples.Passes(count, budget, config.trainer.balance_batch, head != "reward")

    def updates(self, phase: Phase) -> int:
        """Optimizer steps of a step."""
        derived = self.job.derived
        return derived.critic_updates_per_step if phase.name == "update_critic" else derived.actor_updates_per_step

    def _forward(self, phase: Phase) -> Cost:
        return samples.forward_cost(self.pass_model(phase.role, phase), self.passes(phase), self.lengths)

    def _update(self, phase: Phase) -> Cost:
        model, config = self.pass_model(phase.role, phase), self.job.config
        optimizer, ddp = samples.Optimizer.of(self.job.models[phase.role], model.units.itemsize), config.model.ddp
        overlaps = self.on_gpu and model.layout.dp * model.layout.cp > 1
        reduces = overlaps if ddp.overlap_grad_reduce is None else ddp.overlap_grad_reduce
        may_gather = overlaps and optimizer.is_divided and model.lora is None
        gathers = may_gather if ddp.overlap_param_gather is None else ddp.overlap_param_gather
        update = samples.Update(optimizer, self.updates(phase), reduces, gathers)
        return samples.update_cost(model, self.passes(phase), update, self.lengths)

    def _evenness(self, phase: Phase) -> float:
        """1 on machines whose ranks share no cores, where it is not used."""
        if self.machine.node.cores is None or phase.work is None:
            return 1.0
        trains = phase.kind == "train"
        return samples.evenness(self.pass_model(phase.role, phase), self.passes(phase), self.lengths, trains=trains)

    def copied(self, phase: Phase, away: Collection[Part]) -> Cost:
        """Copies of a call, for which what is `away` of its role comes to the device, and back after it."""
        host_copy, judge = self.machine.node.host_copy, self.job.judge
        if phase.role == JUDGE.name and judge is not None:
            return Cost(copies=2.0 * judge.weights * ("parameters" in away) / host_copy)
        moved = tuple(part for part in NEEDED[phase.kind] if part in away and part != "gradients")
        if not moved:
            return NOTHING
        return samples.copied_cost(self.pass_model(phase.role, phase), moved, self._optimizer(phase.role), host_copy)

    def _optimizer(self, role: str) -> samples.Optimizer | None:
        model = self.job.models[role]
        return None if model.optim is None else samples.Optimizer.of(model, model.itemsize)

    # generation

    @cached_property
    def engine(self) -> samples.Engine:
        return self._engine_of(self.job.engine)

    def _engine_of(self, memory: EngineMemory) -> samples.Engine:
        replays = not memory.cfg.enforce_eager
        device = self.machine.device
        units = Units.of(device, DTYPES[memory.itemsize], memory.itemsize, replays=replays)
        of_layers = units if memory.quantization is None else units.with_8_bit_weights(device)
        fixed, operators = (units, of_layers, self.network, self.ranks_per_node), GRAPH if units.replays else ENGINE
        model = PassModel(
            *(memory.shape, memory.layout, "lm", *fixed), sequence_parallel=False, operators=operators, large_elements=0
        )
        return samples.Engine(model, memory.cfg.max_num_batched_tokens, memory.cache.itemsize)

    @cached_property
    def work(self) -> samples.Work:
        """The sequences of an engine."""
        rollout, derived = self.job.config.rollout, self.job.derived
        prompts = self._sequences / (rollout.n if rollout.enable_prefix_caching else 1)
        return samples.Work(self._sequences, prompts, derived.samples_per_step, self._slots())

    @property
    def _sequences(self) -> int:
        """Of an engine in a step."""
        return math.ceil(self.job.derived.samples_per_step / self.job.layouts["rollout"].dp)

    def _generated(self, phase: Phase) -> Cost:
        if phase.role == JUDGE.name:
            return self._judged()
        if (running := self.steady) is not None:
            return self.engine.steadily(self.work, self.lengths, min(self.work.slots, running))
        return samples.generation_cost(self.engine, self.work, self.lengths)

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
        work = samples.Work(sequences, sequences, each.total // n, each.slots)
        return samples.generation_cost(self.engine, work, self.lengths)

    def _judged(self) -> Cost:
        """A question for each sample, whose answer has the largest length."""
        judge = self.job.judge
        assert judge is not None
        cfg, total = self.job.config.reward.judge, self.job.derived.samples_per_step
        sequences = math.ceil(total / judge.layout.dp)
        prompt = min(cfg.max_prompt_length, round(self.lengths.mean))
        lengths = Lengths.fixed(prompt, cfg.max_response_length)
        work = samples.Work(sequences, sequences, total, cfg.max_num_seqs)
        return samples.generation_cost(self._engine_of(judge), work, lengths)

    def _slots(self) -> int:
        """Sequences that run at once: at most as the engine allows, and as the KV cache holds at their mean length."""
        model = self.engine.model
        cached = sum(count * it.cached_width for it, count in samples.computations_of(model))
        each = self.lengths.mean * cached * self.engine.cache_itemsize
        return max(1, min(self.job.config.rollout.max_num_seqs, int(self._kv_cache() / each)))

    def _kv_cache(self) -> float:
        """Bytes, as `TrainingPlan` has them, from the weights of the fullest rank."""
        config, memory, capacity = self.job.config, self.machine.device.memory_gib, self.job.capacity
        if self.on_gpu and memory is not None:
            capacity = int(min(config.job.gpu_memory_gib, memory) * GIB)
        resident = self._resident() if self.resident_beside is None else self.resident_beside
        if "shared_weights" not in config.engine.supports:
            resident += int(self.engine_bytes / self.engine.model.layout.tp)
        return float(self.job.engine.cache.nbytes(capacity, resident))

    def _resident(self) -> int:
        """Bytes of models that stay on the rollout's ranks while they generate, of the fullest stage of each."""
        job, ranks = self.job, set(self._ranks("rollout"))
        there = {role: model for role, model in job.models.items() if not ranks.isdisjoint(model.layout.ranks)}
        states = {role: samples.least_states(model) for role, model in there.items()}
        return sum(max(it.without(job.away(role)).total for it in states[role]) for role in there)

    @cached_property
    def engine_bytes(self) -> float:
        """Of the whole model as the engine has it."""
        engine = self.job.engine
        return float(whole_numbers(engine.shape) * engine.itemsize - engine.saved * engine.layout.tp)

    # the rest

    def _refit(self) -> Cost:
        source, destination = self.job.layouts["actor"], self.job.layouts["rollout"]
        shares: tuple[Moved, ...] = refit_shares(source, destination, self.stage_shares(), self.ranks_per_node)
        busy = group_of(destination, self.ranks_per_node, "tp").busy
        bandwidth, aliases = self.machine.device.memory_bandwidth, self.job.aliases
        cost = refit_cost(shares, self.engine_bytes, self.network, bandwidth, busy, aliases=aliases)
        if "parameters" not in self.job.away("actor"):
            return cost
        host_copy = self.machine.node.host_copy
        return cost + samples.copied_cost(self.pass_model("actor"), ("parameters",), None, host_copy)

    def stage_shares(self) -> tuple[float, ...]:
        """Of the actor's weights, the share of each pipeline stage."""
        model, layout = self.pass_model("actor"), self.job.layouts["actor"]
        whole = [it.dense * layout.tp + it.experts * layout.ep * layout.etp for it in model.numbers]
        return tuple(numbers / sum(whole) for numbers in whole)

    def _advantages(self) -> Cost:
        """Elementwise work on the responses' tokens, on one rank of each of the actor's replicas."""
        derived, device = self.job.derived, self.machine.device
        tokens = derived.samples_per_step * self.lengths.response / derived.roles["actor"].dp
        moved = RESPONSE_COLUMNS * FP32 * tokens / device.memory_bandwidth
        return Cost(memory=moved, launches=ADVANTAGE_OPERATORS * device.launch)

    def _archive(self) -> Cost:
        tokens = self.lengths.mean + RESPONSE_COLUMNS * self.lengths.response
        return Cost(copies=self.job.derived.samples_per_step * tokens * FP32 / self.machine.node.write)

    def _save(self) -> Cost:
        """What a save takes of each step: the loop waits for it, or only for the copy in host memory
        (trainer.checkpoint.async_save)."""
        trainer, node = self.job.config.trainer, self.machine.node
        copied = sum(self.checkpoint_bytes().values()) / len(self._saving_ranks()) / node.host_copy
        return Cost(copies=(copied if trainer.checkpoint.async_save else self.saved(node.write)) / trainer.save_freq)

    def saved(self, rate: float) -> float:
        """Seconds in which all nodes at the same time write or read a save, each so many bytes per second."""
        nodes = max(1, len(self._saving_ranks()) // self.ranks_per_node)
        return sum(self.checkpoint_bytes().values()) / rate / nodes

    def checkpoint_bytes(self) -> dict[str, float]:
        """By role: weights and optimizer state of trained models."""
        nbytes = {}
        for role, model in self.job.models.items():
            if (optimizer := self._optimizer(role)) is not None:
                numbers = numbers_of(model.shape, *stages_of(model.shape), 1, 1, 1, model.head, model.lora)
                copy = FP32 * (model.itemsize == FP32 and optimizer.is_divided)  # the optimizer's own, of fp32 weights
                nbytes[role] = numbers.all * model.itemsize + optimizer.nbytes(numbers) + copy * numbers.trained
        return nbytes


@lru_cache(maxsize=64)
def whole_numbers(shape: ModelShape) -> int:
    """Weights of the whole model."""
    return numbers_of(shape, *stages_of(shape), 1, 1, 1).all
