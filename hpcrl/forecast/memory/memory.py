"""What every rank of a job holds in each phase of a step, in bytes, and what would make it fit. No torch.

A rank has a place: the pipeline stage of each role that it is in. Ranks of one place hold the same but for their share
of the optimizer, of which the largest is taken.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

from hpcrl.config.derive import Derived, check
from hpcrl.config.roles import ACTOR, JUDGE, PLACED, REF, ROLLOUT, Part, RoleSpec, offloaded, shares_weights, with_own
from hpcrl.config.roles import place as place_roles
from hpcrl.config.schema import Config, S
from hpcrl.engine.refit.planner import RankTraffic, Resharding
from hpcrl.forecast.memory.activations import Pass
from hpcrl.forecast.memory.generation import GIB, MIB, EngineMemory, PicturePass, encoding_work
from hpcrl.forecast.memory.state import FP32, ITEMSIZE, RoleModel, State, job_shape, model_shape
from hpcrl.model.architecture import check_longest, check_towers, check_vision
from hpcrl.model.blocks.block import unsupported
from hpcrl.model.params import check_adapters, check_fp8, quantized_names, role_layout
from hpcrl.model.shape import Lora
from hpcrl.rollout.engines.engine import engine_of
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.layout import Layout

Kind = Literal["generate", "forward", "train", "refit", "save"]
NEEDED: dict[Kind, tuple[Part, ...]] = {  # of the role that works
    "generate": (),
    "forward": ("parameters",),
    "train": ("parameters", "gradients", "optimizer"),
    "refit": ("parameters",),
    "save": ("parameters", "optimizer"),
}


class Phase(NamedTuple):
    """A part of a step, and the role that works in it; `work`: its micro-batches."""

    name: str
    role: str
    kind: Kind
    work: Pass | None = None


class Place(NamedTuple):
    """Ranks with the same memory, and their pipeline stage in each of their roles."""

    ranks: tuple[int, ...]
    stages: Mapping[str, int]


class Row(NamedTuple):
    """Bytes of a rank of a place in a phase."""

    phase: str
    place: Place
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    kv_cache: int
    refit: int

    @property
    def total(self) -> int:
        return sum(self[2:])


@dataclass(frozen=True)
class TrainingPlan:
    """The memory of a training job. Raises ConfigError or InputError, one line, if it cannot run."""

    config: Config
    own_roles: tuple[RoleSpec, ...] = ()

    @cached_property
    def derived(self) -> Derived:
        job = self.config.job
        return check(self.config, job.nodes * job.ntasks_per_node, own_roles=self.own_roles)

    @property
    def steps(self) -> int | None:
        """Steps of the run; None if they depend on the data."""
        return self.config.trainer.total_training_steps

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.derived.max_sequence_length

    @property
    def least_tokens(self) -> int:
        """Tokens that a micro-batch of a trained role can have at least."""
        return self.least_sequences * self.longest

    @property
    def least_sequences(self) -> int:
        """Sequences that are in one micro-batch together."""
        return 1

    @cached_property
    def known(self) -> dict[str, RoleSpec]:
        """All roles by name."""
        return {spec.name: spec for spec in with_own(PLACED, self.own_roles)}

    @cached_property
    def specs(self) -> dict[str, RoleSpec]:
        """Roles for which megatron builds a model."""
        return {role: self.known[role] for role in self.derived.roles if self.known[role].head is not None}

    @cached_property
    def refit(self) -> Resharding:
        """Of the actor's weights to the engine. Nothing is checked but the two layouts."""
        config, each = self.config, self.config.job.ntasks_per_node
        world_size = config.job.nodes * each
        shape, roles = job_shape(config), place_roles(config, [ACTOR, ROLLOUT], world_size)
        return Resharding(
            shape,
            role_layout(shape, "actor", **roles["actor"].grid),
            role_layout(shape, "rollout", **roles["rollout"].grid),
            ITEMSIZE[config.rollout.dtype or config.model.dtype],
            nodes=tuple(rank // each for rank in range(world_size)),
            engine_shards=engine_of(config).layout,
        )

    @property
    def aliases(self) -> bool:
        """Whether the engine shares weights with the actor instead of having its own."""
        rollout, dtypes = self.config.rollout, (None, self.config.model.dtype)
        can_share = "shared_weights" in self.config.engine.supports
        return shares_weights(self.config) and can_share and rollout.dtype in dtypes

    def shared(self, rank: int) -> int:
        """Bytes of a rank that the engine shares with the actor."""
        shared = self.refit.shared(rank) if self.aliases else ()
        return sum(its.nbytes for its in shared if its.name not in self._quantized)

    @cached_property
    def _quantized(self) -> frozenset[str]:
        return quantized_names(self.refit.shape, self.config.rollout.quantization)

    @property
    def on_gpu(self) -> bool:
        return self.config.job.gpus_per_node > 0

    @property
    def capacity(self) -> int | None:
        """Bytes of a rank's GPU; None without a GPU."""
        return int(self.config.job.gpu_memory_gib * GIB) if self.on_gpu else None

    @cached_property
    def models(self) -> dict[str, RoleModel]:
        config, fp8 = self.config, self.config.model.transformer_engine.fp8
        shape, models = job_shape(config), {}
        if shape.vision is not None:
            check_vision(config, shape.vision)
        for role, spec in self.specs.items():
            architecture = spec.architecture(config)
            own = shape if architecture is config.model else model_shape(architecture, shape.vocab_size)
            check_longest(own, config, "model" if own is shape else spec.path)
            layout = role_layout(own, role, **self.derived.roles[role].grid)
            if layout.cp > 1 and (block := unsupported(own.layers, "planned_cp")):
                raise InputError(f"placement.{role}.cp={layout.cp} with {block} is not counted yet; plan with cp=1")
            itemsize = ITEMSIZE[architecture.dtype]
            exact = config.rollout.exact and spec.path in (ACTOR.name, REF.name)
            lora = Lora.from_config(config.model) if ACTOR.name in (spec.name, spec.path) else None
            if lora is not None:
                check_adapters(own, layout, lora)
            check_fp8(own, fp8)
            optim = spec.config_of(config).optim if spec.trains else None
            models[role] = RoleModel(
                *(own, layout, spec.head or "lm", itemsize, optim, not exact, lora), fp8=fp8 is not None
            )
        check_towers(shape, {self.specs[role].path: model.shape for role, model in models.items()})
        return models

    @cached_property
    def engine(self) -> EngineMemory:
        """The rollout engine."""
        cfg, refit, longest = self.config.rollout, self.refit, self.longest
        fixed = cfg, refit.shape, self.layouts["rollout"], refit.itemsize, longest
        return EngineMemory(*fixed, cfg.quantization, cfg.kv_cache_dtype)

    @cached_property
    def judge(self) -> EngineMemory | None:
        """The judge's engine, if the job has a judge."""
        placed, cfg = self.derived.roles.get(JUDGE.name), self.config.reward.judge
        if placed is None:
            return None
        architecture = JUDGE.architecture(self.config)
        shape = model_shape(architecture, job_shape(self.config).vocab_size)
        layout, longest = role_layout(shape, JUDGE.name, **placed.grid), cfg.max_prompt_length + cfg.max_response_length
        return EngineMemory(cfg, shape, layout, ITEMSIZE[architecture.dtype], longest)

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        layouts = {role: model.layout for role, model in self.models.items()}
        if (placed := self.derived.roles.get(ROLLOUT.name)) is not None:
            layouts[ROLLOUT.name] = role_layout(self.refit.shape, ROLLOUT.name, **placed.grid)
        if self.judge is not None:
            layouts[JUDGE.name] = self.judge.layout
        return layouts

    @cached_property
    def places(self) -> list[Place]:
        ranks: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for rank in range(self.derived.world_size):
            stages = tuple((role, layout.coord(rank).pp) for role, layout in self.layouts.items() if rank in layout)
            if stages:
                ranks.setdefault(stages, []).append(rank)
        return [Place(tuple(members), dict(stages)) for stages, members in ranks.items()]

    @cached_property
    def phases(self) -> list[Phase]:
        """Phases in the order of a step."""
        config, derived = self.config, self.derived
        step, actor = derived.samples_per_step, config.actor

        def phase(name: str, role: str, kind: Kind, samples: int, entropy: bool = False) -> Phase:
            return Phase(name, role, kind, self._work(role, self.specs[role].token_budget(config), samples, entropy))

        entropy = actor.entropy_coeff != 0 or actor.calculate_entropy or derived.old_log_prob_in_update
        in_update = derived.old_log_prob_in_update and not (derived.needs_critic and config.trainer.critic_warmup > 0)
        built_in = {spec.name for spec in PLACED}
        own = [spec for role, spec in self.specs.items() if role not in built_in]
        phases = [Phase("rollout", "rollout", "generate")]
        if self.judge is not None:
            phases.append(Phase("judge", "judge", "generate"))
        if not config.algorithm.rollout_correction.bypass_mode and not in_update:
            phases.append(phase("old_log_prob", "actor", "forward", step))
        if derived.needs_ref:
            phases.append(phase("ref", "actor" if derived.ref_in_actor else "ref", "forward", step))
        frozen = {"teacher": config.distillation.enabled, "reward": config.reward.reward_model.enable}
        phases += [phase(role, role, "forward", step) for role, is_needed in frozen.items() if is_needed]
        phases += [phase(spec.name, spec.name, "forward", step) for spec in own]
        if derived.needs_critic:
            phases.append(phase("values", "critic", "forward", step))
        mini_batch = derived.actor_mini_batch_samples
        phases += [phase(f"update_{spec.name}", spec.name, "train", mini_batch) for spec in own if spec.trains]
        if derived.needs_critic:
            critic_mini_batch = derived.critic_mini_batch_size * config.rollout.n
            phases.append(phase("update_critic", "critic", "train", critic_mini_batch))
        phases += [phase("update_actor", "actor", "train", mini_batch, entropy), Phase("refit", "rollout", "refit")]
        saved = [role for role, model in self.models.items() if model.optim is not None]
        return phases + [Phase(f"save_{role}", role, "save") for role in saved]

    def rows(self) -> list[Row]:
        """Rows of every phase and the places that take part in it."""
        return [
            self._row(phase, place)
            for phase in self.phases
            for place in self.places
            if not place.stages.keys().isdisjoint({"actor", "rollout"} if phase.kind == "refit" else {phase.role})
        ]

    def away(self, role: str) -> tuple[Part, ...]:
        """What of a role's model is in host memory while other roles compute."""
        return offloaded(self.config, self.known[role])

    @staticmethod
    def needed(role: str, phase: Phase) -> tuple[Part, ...]:
        """What of a role's model a phase has on the device."""
        return NEEDED[phase.kind] if role == phase.role or (role == "actor" and phase.kind == "refit") else ()

    def on_device(self, phase: Phase, place: Place) -> list[State]:
        """State on the device in a phase, of each of the place's roles."""
        away = {role: {*self.away(role)}.difference(self.needed(role, phase)) for role in self._roles(place)}
        return [self.states[role, place.stages[role]].without(parts) for role, parts in away.items()]

    def on_host(self, place: Place) -> int:
        """Bytes of a rank's host memory that hold offloaded state."""
        held = {role: self.states[role, place.stages[role]] for role in self._roles(place)}
        if self.judge is not None and JUDGE.name in place.stages:
            held[JUDGE.name] = State(self.judge.weights)
        return sum(state.on_host(self.away(role)) for role, state in held.items())

    def on_hosts(self) -> dict[int, int]:
        """Bytes of `on_host` by node."""
        found: Counter[int] = Counter()
        for place in self.places:
            nbytes = self.on_host(place)
            for rank in place.ranks:
                found[rank // self.config.job.ntasks_per_node] += nbytes
        return found

    def _roles(self, place: Place) -> list[str]:
        return [role for role in self.models if role in place.stages]

    @cached_property
    def states(self) -> dict[tuple[str, int], State]:
        """(role, stage) -> the state of a rank with the largest one."""
        return {(role, n): model.state(n) for role, model in self.models.items() for n in range(model.layout.pp)}

    def _work(self, role: str, max_tokens: int, samples: int, entropy: bool) -> Pass:
        """Micro-batches that are as full as possible, of prompts and responses of the largest length."""
        data, model, longest = self.config.data, self.models[role], self.longest
        layout, unit = model.layout, self.least_sequences if self.specs[role].trains else 1
        sequences = max_tokens // (unit * longest) * unit
        of_replica, multiple = math.ceil(samples / layout.dp), layout.token_multiple(model.row_multiple)
        count = layout.scheduled(math.ceil(of_replica / sequences))
        if layout.vpp > 1:  # with more micro-batches than it takes, each is less full
            sequences = math.ceil(of_replica / count)
            max_tokens = min(max_tokens, sequences * longest)
        rows = sequences if model.head == "reward" else math.ceil(max_tokens * data.max_response_length / longest)
        chunk = None if self.config.rollout.exact else self.config.trainer.head_chunk_tokens
        tokens, rows = -(-max_tokens // multiple) * multiple // layout.cp, math.ceil(rows / layout.cp)
        again, moe = self.config.model.recompute, self.config.model.moe if model.optim is not None else None
        replays = role == "actor" and self.config.actor.router_replay.mode != "disabled"
        fixed = model, tokens, rows, count, self.on_gpu, entropy, chunk, again, longest, moe, replays
        return Pass(*fixed, self._pictures(model, max_tokens, sequences))

    def _pictures(self, model: RoleModel, max_tokens: int, sequences: int) -> PicturePass | None:
        """Pictures that fill the prompts of a micro-batch of at most so many sequences. While the tower is trained,
        each role encodes them, and their patches count in the size of a micro-batch."""
        data, vision, layout = self.config.data, model.shape.vision, model.layout
        if vision is None or (tower := self.models["actor"].shape.vision) is None:
            return None
        num_ranks, patches = layout.tp * layout.cp, 0
        if tower.train != "none":
            of_prompt = data.max_prompt_length * vision.merge_size**2
            of_picture = min(of_prompt, (data.max_pixels or math.inf) // vision.patch_size**2)
            cost = self.longest + int(model.shape.tokens_per_patch * of_prompt)
            sequences = min(sequences, max(1, max_tokens // cost))
            patches = int(math.ceil(sequences * of_prompt / of_picture / num_ranks) * of_picture)
        num_parts = layout.tp if model.sequence_parallel else 1
        return PicturePass(vision, model.itemsize, sequences * data.max_prompt_length, patches, num_ranks, num_parts)

    def environments_on_host(self) -> int:
        """Bytes of a node's host memory that the processes of environments may have: those of the node with the most
        leaders of the rollout, each with as many open environments as it may have samples."""
        config, layout = self.config, self.layouts.get(ROLLOUT.name)
        cfg = config.rollout.multi_turn.environment
        if layout is None or not config.rollout.multi_turn.has_environment:
            return 0
        leaders = Counter(rank // config.job.ntasks_per_node for rank in layout.leaders)
        samples = math.ceil(config.data.train_batch_size * config.rollout.n / layout.dp)
        most = cfg.max_open or config.rollout.max_num_seqs
        is_stream = config.async_training.mode == "bounded_staleness"  # a validation runs beside it
        num_open = 2 * most if is_stream else min(most, samples)
        return max(leaders.values()) * num_open * cfg.memory_limit_mb * MIB

    def pictures_on_host(self, place: Place) -> int:
        """Bytes of a rank's host memory for pictures at most: features that are kept, and the columns of a step on a
        leader of the rollout and of the role with most of them."""
        vision, data, derived = self.models["actor"].shape.vision, self.config.data, self.derived
        if vision is None:
            return 0
        frozen, engines = vision.train == "none", "rollout" in place.stages
        width = vision.feature_width if frozen else vision.merge_size**2 * vision.patch_width
        shares = [math.ceil(data.train_batch_size / self.layouts[role].dp) for role in self._roles(place)]
        prompts = max(shares, default=0) + (math.ceil(data.train_batch_size / derived.roles["rollout"].dp) * engines)
        cache = int(self.config.model.vision.cache_gib * GIB) if frozen and engines else 0
        return cache + prompts * data.max_prompt_length * width * FP32

    def _row(self, phase: Phase, place: Place) -> Row:
        states = self.on_device(phase, place)
        parameters, gradients, optimizer = (sum(state[column] for state in states) for column in range(3))
        parameters += sum(state.copies for state in states)
        kv_cache = activations = logits = 0
        buffers, own, whole = self._of_engine[place.ranks]
        if phase.kind == "refit":
            buffers += self.models["actor"].merged(place.stages["actor"]) if "actor" in place.stages else 0
        elif self.on_gpu:
            buffers = 0  # in host memory they stay
        if "rollout" in place.stages:
            parameters += own
            generates = phase.name == "rollout" or self.config.async_training.mode != "sync"
            if generates or not self.config.rollout.free_cache_engine:
                kv_cache = self._kv_cache(self._idle(place), own)
            if generates:
                activations, logits = self._generation()
            if phase.kind == "refit":
                parameters += whole - own
        if self.judge is not None and JUDGE.name in place.stages:
            judges = phase.role == JUDGE.name
            parameters += self.judge.weights if judges or not self.away(JUDGE.name) else 0
            if judges:  # the engine is built after all other models
                taken = self._idle(place)
                taken += own + self._kv_cache(taken, own) if "rollout" in place.stages else 0
                kv_cache += self.judge.cache.nbytes(self.capacity, taken)
                activations, logits = self.judge.work()
        gathered = [p.work.gathered() for p in self.phases if p.work and p.role in place.stages]
        if phase.work is not None and phase.role in place.stages:
            stage, work = place.stages[phase.role], phase.work
            activations, logits = work.training(stage) if phase.kind == "train" else work.forward(stage)
            if phase.kind == "train":  # the optimizer's step begins when the passes have freed theirs
                activations = max(activations, self.models[phase.role].update(stage) - logits)
            activations -= work.gathered()
        activations += max(gathered, default=0)
        return Row(phase.name, place, parameters, gradients, optimizer, activations, logits, kv_cache, buffers)

    @cached_property
    def _of_engine(self) -> dict[tuple[int, ...], tuple[int, int, int]]:
        """By place: buffers of a refit, the engine's own weights, and its weights before the first refit."""
        if ROLLOUT.name not in self.layouts:
            return {place.ranks: (0, 0, 0) for place in self.places}
        traffic, bucket = _traffic(self.refit), self.config.rollout.checkpoint_engine
        limit = bucket.update_weights_bucket_megabytes * 2**20
        sizes = {}
        for place in self.places:
            buffers = own = whole = 0
            for rank in place.ranks:
                if rank in traffic:
                    its = traffic[rank]
                    buffers = max(buffers, min(limit, its.sent + its.received))
                    needed = its.received + its.copied - (self.engine.saved if rank in self.layouts["rollout"] else 0)
                    own = max(own, needed - self.shared(rank))
                    whole = max(whole, needed)
            sizes[place.ranks] = buffers, own, whole
        return sizes

    def _idle(self, place: Place) -> int:
        """Bytes of other models on the device while an engine is built."""
        return sum(state.total for state in self.on_device(self.phases[0], place))

    def _kv_cache(self, taken: int, weights: int) -> int:
        """Bytes of a rank's KV cache, besides `taken` bytes and the engine's `weights`; at least one sequence has to
        fit."""
        return engine_of(self.config).cache_bytes(self.engine.cache, self.capacity, taken, weights)

    def _generation(self) -> tuple[int, int]:
        engine, data = self.engine, self.config.data
        activations, logits = engine.work()
        if engine.shape.vision is not None:  # pictures are encoded first
            prompts = math.ceil(data.train_batch_size / engine.layout.dp)
            cfg, tp, longest = self.config.rollout, engine.layout.tp, data.max_prompt_length
            encoding = encoding_work(cfg, engine.shape.vision, tp, engine.itemsize, prompts, longest)
            activations = max(activations, encoding)
        return activations, logits


@lru_cache(maxsize=8)
def _traffic(resharding: Resharding) -> dict[int, RankTraffic]:
    """Kept because most changes that `cheapest_fix` tries leave the two layouts as they are."""
    return resharding.traffic()


def with_keys(section: S, changes: Mapping[str, object]) -> S:
    """The config, or a section, with other values of dotted keys. Keys inside a section that is itself replaced change
    the new one."""
    update, inside = dict[str, Any](), defaultdict[str, dict[str, object]](dict)
    for key, value in changes.items():
        name, _, rest = key.partition(".")
        if rest:
            inside[name][rest] = value
        else:
            update[name] = value
    for name, its in inside.items():
        update[name] = with_keys(update[name] if name in update else getattr(section, name), its)
    return section.model_copy(update=update)


def binary(nbytes: int) -> str:
    """A size in MiB or GiB."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.2f} MiB"


def size(nbytes: float) -> str:
    """A size in units of powers of 1000."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes:.0f} B"
