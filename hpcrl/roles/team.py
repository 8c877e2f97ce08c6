"""From a config to the workers of this rank: layouts, groups, models, engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcrl.config.derive import Derived, DerivedGenerate, DerivedModel, DerivedRm, DerivedSft
from hpcrl.config.offload import shares_weights
from hpcrl.config.placement import PlacedRole, architecture
from hpcrl.config.schema import Config, DataConfig
from hpcrl.controller.worker import Worker
from hpcrl.data.preference import PreferenceDataset
from hpcrl.data.prompts import PromptDataset
from hpcrl.data.sft import SftDataset
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.grid.groups import GroupCache, RoleGroups, make_groups
from hpcrl.grid.layout import Layout
from hpcrl.model.hf.directory import shape_of
from hpcrl.model.lora import Lora
from hpcrl.model.params import check_adapters, role_layout
from hpcrl.model.shape import ModelShape
from hpcrl.rewards.manager import RewardManager, asks_rules, check_rewards
from hpcrl.roles.actor import ActorWorker
from hpcrl.roles.archive import ArchiveWorker
from hpcrl.roles.critic import CriticWorker
from hpcrl.roles.generations import GenerationsWorker
from hpcrl.roles.hf_export import ExportWorker
from hpcrl.roles.model_worker import ModelWorker
from hpcrl.roles.policy import PolicyWorker
from hpcrl.roles.preference import PreferenceDataWorker, PreferenceWorker
from hpcrl.roles.ref import RefWorker
from hpcrl.roles.refit import RefitWorker, make_refit
from hpcrl.roles.reward import RewardModelWorker
from hpcrl.roles.rollout import RolloutWorker
from hpcrl.roles.rollout_engine import make_engine
from hpcrl.roles.scorer import ResponseScorer, ScorerWorker
from hpcrl.roles.sft import SftActorWorker, SftDataWorker
from hpcrl.roles.teacher import TeacherWorker, teacher_shape
from hpcrl.rollout.agent.loop import AgentLoop
from hpcrl.rollout.agent.tools import tool_schemas
from hpcrl.runtime import platform
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.job import run_directory
from hpcrl.runtime.mpi import create_group
from hpcrl.runtime.world import World

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Inputs:
    """What every rank reads from files before anything is built. Bad files end the job here, with one line."""

    tokenizer: PreTrainedTokenizerBase
    prompts: dict[str, PromptDataset]  # "train", "val"
    answers: SftDataset | None
    shape: ModelShape
    others: dict[str, ModelShape]  # models that are only asked, which may be of another shape: "teacher", "reward"


@dataclass(frozen=True)
class RmInputs:
    """As `Inputs`, of `hpcrl rm`."""

    pairs: dict[str, PreferenceDataset]  # "train", and "val" where there are evaluations
    shape: ModelShape


@dataclass(frozen=True)
class Team:
    """This rank's worker of each role it is in; class and layout of every role."""

    workers: dict[str, Worker]
    kinds: dict[str, type[Worker]]
    layouts: dict[str, Layout]


def read_inputs(config: Config, world: World, *, sft: bool = False) -> Inputs:
    """Tokenizer, datasets and the model's shape; collective, as the ranks share the work."""
    tokenizer, shape = _read_model(config)
    data = _data_config(config)
    answers = None
    if sft:
        answers = SftDataset(data.train_files, tokenizer, data, config.sft.answer_key, data.train_max_samples, world)
        prompts = {"train": answers.prompts}
    else:
        prompts = {"train": PromptDataset(data.train_files, tokenizer, data, data.train_max_samples, world)}
    if data.val_files:
        prompts["val"] = PromptDataset(data.val_files, tokenizer, data, data.val_max_samples, world)
    check_rewards(config.reward, [source for dataset in prompts.values() for source in dataset.data_sources()])
    others = {}
    if config.distillation.enabled and not sft:
        others["teacher"] = teacher_shape(config, shape)
    if config.reward.reward_model.enable and not sft:
        others["reward"] = shape_of(architecture(config, "reward"), shape.vocab_size)
    return Inputs(tokenizer, prompts, answers, shape, others)


def read_generation_inputs(config: Config, split: str, world: World, *, scored: bool = True) -> Inputs:
    """As `read_inputs`, of the one data set that samples are drawn for."""
    tokenizer, shape = _read_model(config)
    data = _data_config(config)
    files = {"train": (data.train_files, data.train_max_samples), "val": (data.val_files, data.val_max_samples)}[split]
    prompts = PromptDataset(files[0], tokenizer, data, files[1], world)
    others = {}
    if scored:
        check_rewards(config.reward, prompts.data_sources())
        if config.reward.reward_model.enable:
            others["reward"] = shape_of(architecture(config, "reward"), shape.vocab_size)
    return Inputs(tokenizer, {split: prompts}, None, shape, others)


def read_rm_inputs(config: Config, world: World) -> RmInputs:
    """As `read_inputs`, for `hpcrl rm`."""
    tokenizer, shape = _read_model(config)
    shape = shape_of(architecture(config, "reward"), shape.vocab_size)
    data, pairs = config.data, {}
    files = {"train": (data.train_files, data.train_max_samples), "val": (data.val_files, data.val_max_samples)}
    for split, (paths, max_samples) in files.items():
        if split == "train" or config.rm.eval_freq > 0:
            pairs[split] = PreferenceDataset(
                paths,
                tokenizer,
                data,
                chosen_key=config.rm.chosen_key,
                rejected_key=config.rm.rejected_key,
                max_samples=max_samples,
                world=world,
            )
    return RmInputs(pairs, shape)


def _data_config(config: Config) -> DataConfig:
    """The section `data`, whose chat template is told of the tools."""
    multi_turn = config.rollout.multi_turn
    if not multi_turn.enable or multi_turn.function_tool_path is None:
        return config.data
    told = {"tools": tool_schemas(multi_turn.function_tool_path)} | config.data.apply_chat_template_kwargs
    return config.data.model_copy(update={"apply_chat_template_kwargs": told})


def _read_model(config: Config) -> tuple[PreTrainedTokenizerBase, ModelShape]:
    named = config.model.tokenizer or config.model.path
    if named is None:
        raise InputError("model.tokenizer and model.path are null; name a tokenizer directory")
    tokenizer = load_tokenizer(named)
    shape = shape_of(config.model, len(tokenizer))
    check_longest(shape, config)
    check_experts(shape, config)
    return tokenizer, shape


def check_experts(shape: ModelShape, config: Config) -> None:
    """InputError where the job wants something of experts that the model does not have."""
    mode, moe = config.actor.router_replay.mode, config.model.moe
    wanted = {
        f"actor.router_replay.mode={mode}": mode != "disabled",
        f"model.moe.aux_loss_coeff={moe.aux_loss_coeff}": moe.aux_loss_coeff > 0,
        f"model.moe.z_loss_coeff={moe.z_loss_coeff}": moe.z_loss_coeff > 0,
    }
    for key, is_wanted in wanted.items():
        if is_wanted and not shape.num_experts:
            raise InputError(f"{key} is for a mixture of experts, and the model has none; leave it out")


def check_longest(shape: ModelShape, config: Config) -> None:
    """InputError where sequences may get longer than the model attends to."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    if longest > shape.max_position_embeddings:
        raise InputError(
            f"data.max_prompt_length + data.max_response_length = {longest} exceeds the "
            f"{shape.max_position_embeddings} tokens that model.path={config.model.path} attends to; shorten them"
        )


def build_team(world: World, config: Config, derived: Derived, inputs: Inputs, total_steps: int) -> Team:
    """Workers of `hpcrl train`. Collective over the world."""
    shape = inputs.shape
    layouts = _layouts(world, derived.roles, shape, inputs.others)
    _check_adapters(world, config, shape, layouts["actor"])
    groups = _groups(world, layouts)
    kinds: dict[str, type[Worker]] = {"actor": ActorWorker}
    workers: dict[str, Worker] = {}
    if "actor" in groups:
        workers["actor"] = ActorWorker(groups["actor"], shape, config, derived, total_steps)
    if derived.needs_critic:
        kinds["critic"] = CriticWorker
        if "critic" in groups:
            workers["critic"] = CriticWorker(groups["critic"], shape, config, derived, total_steps)
    if "ref" in derived.roles:
        kinds["ref"] = RefWorker
        if "ref" in groups:
            workers["ref"] = RefWorker(groups["ref"], shape, config, derived)
    if derived.needs_teacher:
        kinds["teacher"] = TeacherWorker
        if "teacher" in groups:
            workers["teacher"] = TeacherWorker(groups["teacher"], inputs.others["teacher"], config, derived)
    if derived.needs_reward_model:
        kinds["reward"] = RewardModelWorker
        if "reward" in groups:
            workers["reward"] = RewardModelWorker(groups["reward"], inputs.others["reward"], config)
    if config.trainer.save_hf or config.model.lora_rank > 0:
        _add_export(world, layouts, kinds, workers)
    layouts["archive"], kinds["archive"] = layouts["actor"], ArchiveWorker
    if world.rank in layouts["archive"]:
        workers["archive"] = ArchiveWorker(layouts["archive"], world.rank, inputs.prompts)
    team = Team(workers, kinds, layouts)
    _add_sampling(world, config, inputs, team, groups)
    return team


def policy_shape(config: Config) -> ModelShape:
    """The policy's, for jobs without prompts: a tokenizer is read only where nothing else says how many tokens there
    are."""
    model = config.model
    counts = model.path is None and model.vocab_size is None and model.tokenizer is not None
    return shape_of(model, len(load_tokenizer(model.tokenizer or "")) if counts else 0)


def build_policy(world: World, config: Config, derived: DerivedModel, shape: ModelShape) -> PolicyWorker | None:
    """The policy alone, on its ranks. Collective over the world."""
    groups = _groups(world, _layouts(world, derived.roles, shape))
    return PolicyWorker(groups["actor"], shape, config) if "actor" in groups else None


def build_conversion_team(world: World, config: Config, derived: DerivedModel, shape: ModelShape) -> Team:
    """Workers of `hpcrl convert`. Collective over the world."""
    layouts = _layouts(world, derived.roles, shape)
    groups = _groups(world, layouts)
    kinds: dict[str, type[Worker]] = {"actor": PolicyWorker}
    workers: dict[str, Worker] = {}
    if "actor" in groups:
        workers["actor"] = PolicyWorker(groups["actor"], shape, config)
    _add_export(world, layouts, kinds, workers)
    return Team(workers, kinds, layouts)


def build_generation_team(
    world: World, config: Config, derived: DerivedGenerate, inputs: Inputs, *, scored: bool = True
) -> Team:
    """Workers of `hpcrl generate` and `hpcrl evaluate`. Collective over the world."""
    layouts = _layouts(world, derived.roles, inputs.shape, inputs.others)
    groups = _groups(world, layouts)
    kinds: dict[str, type[Worker]] = {"actor": PolicyWorker, "generations": GenerationsWorker}
    workers: dict[str, Worker] = {}
    if "actor" in groups:
        workers["actor"] = PolicyWorker(groups["actor"], inputs.shape, config)
    if derived.needs_reward_model:
        kinds["reward"] = RewardModelWorker
        if "reward" in groups:
            workers["reward"] = RewardModelWorker(groups["reward"], inputs.others["reward"], config)
    layouts["generations"] = layouts["rollout"]
    if world.rank in layouts["generations"]:
        workers["generations"] = GenerationsWorker(
            layouts["generations"], world.rank, inputs.prompts, inputs.tokenizer, config.generate.log_probs
        )
    team = Team(workers, kinds, layouts)
    _add_sampling(world, config, inputs, team, groups, scored=scored)
    return team


def build_sft_team(world: World, config: Config, derived: DerivedSft, inputs: Inputs) -> Team:
    """Workers of `hpcrl sft`. Collective over the world."""
    assert inputs.answers is not None
    layouts = _layouts(world, derived.roles, inputs.shape)
    _check_adapters(world, config, inputs.shape, layouts["actor"])
    groups = _groups(world, layouts)
    kinds: dict[str, type[Worker]] = {"actor": SftActorWorker, "data": SftDataWorker}
    workers: dict[str, Worker] = {}
    layouts["data"] = layouts["actor"]
    if "actor" in groups:
        workers["actor"] = SftActorWorker(groups["actor"], inputs.shape, config)
        workers["data"] = SftDataWorker(layouts["actor"], world.rank, inputs.answers)
    if config.trainer.save_hf or config.model.lora_rank > 0:
        _add_export(world, layouts, kinds, workers)
    team = Team(workers, kinds, layouts)
    if "rollout" in layouts:
        _add_sampling(world, config, inputs, team, groups)
    return team


def build_rm_team(world: World, config: Config, derived: DerivedRm, inputs: RmInputs) -> Team:
    """Workers of `hpcrl rm`. Collective over the world."""
    layouts = _layouts(world, derived.roles, inputs.shape)
    groups = _groups(world, layouts)
    kinds: dict[str, type[Worker]] = {"reward": PreferenceWorker, "data": PreferenceDataWorker}
    workers: dict[str, Worker] = {}
    layouts["data"] = layouts["reward"]
    if "reward" in groups:
        workers["reward"] = PreferenceWorker(groups["reward"], inputs.shape, config)
        workers["data"] = PreferenceDataWorker(layouts["data"], world.rank, inputs.pairs)
    return Team(workers, kinds, layouts)


def _add_export(
    world: World, layouts: dict[str, Layout], kinds: dict[str, type[Worker]], workers: dict[str, Worker]
) -> None:
    """On the policy's ranks."""
    layouts["export"], kinds["export"] = layouts["actor"], ExportWorker
    if "actor" in workers:
        policy = workers["actor"]
        assert isinstance(policy, ModelWorker)
        workers["export"] = ExportWorker(policy, world.comm)


def _add_sampling(
    world: World, config: Config, inputs: Inputs, team: Team, groups: dict[str, RoleGroups], *, scored: bool = True
) -> None:
    """Generation, and the roles that go with it: scoring on its home ranks, refit on its and the actor's ranks."""
    workers, kinds, layouts = team.workers, team.kinds, team.layouts
    rank, rollout, actor = world.rank, layouts["rollout"], layouts["actor"]
    layouts["scorer"], kinds["scorer"], kinds["rollout"] = rollout, ScorerWorker, RolloutWorker
    if rank in rollout:
        scorer = _response_scorer(config, inputs, rank) if scored and rank in rollout.homes else None
        engine = make_engine(groups["rollout"], inputs.shape, config, ranks_on_node=world.local_size)
        agent = _agent_loop(world, config, inputs, rollout) if config.rollout.multi_turn.enable else None
        workers["rollout"] = RolloutWorker(rollout, rank, engine, config, inputs.prompts, scorer, agent)
        workers["scorer"] = ScorerWorker(rollout, rank, scorer, config.reward.reward_model)
    layouts["refit"], kinds["refit"] = Layout(tuple(sorted({*actor.ranks, *rollout.ranks}))), RefitWorker
    refit = make_refit(world, config, inputs.shape, actor, rollout)
    if refit is not None:
        workers["refit"] = RefitWorker(
            layouts["refit"],
            rank,
            refit,
            workers.get("actor"),  # type: ignore[arg-type]
            workers.get("rollout"),  # type: ignore[arg-type]
            alias=shares_weights(config),
        )


def _agent_loop(world: World, config: Config, inputs: Inputs, rollout: Layout) -> AgentLoop:
    """Collective over the ranks of each replica."""
    replica = rollout.replica(rollout.coord(world.rank).dp)
    comm = create_group(world.comm, replica) if len(replica) > 1 else None
    log_path = run_directory(config) / "logs" / f"tools_{world.rank:05d}.log"
    return AgentLoop(config.rollout.multi_turn, config.data, inputs.tokenizer, comm, str(log_path))


def _response_scorer(config: Config, inputs: Inputs, rank: int) -> ResponseScorer:
    manager = None
    if asks_rules(config.reward):
        log_path = run_directory(config) / "logs" / f"scorer_{rank:05d}.log"
        manager = RewardManager(config.reward, config.data.max_response_length, str(log_path))
    return ResponseScorer(manager, inputs.tokenizer, inputs.prompts)


def _layouts(
    world: World, roles: Mapping[str, PlacedRole], shape: ModelShape, others: Mapping[str, ModelShape] | None = None
) -> dict[str, Layout]:
    """Of every role; a size that does not divide its model ends the job, on all ranks, with one line."""
    shapes = others or {}
    return world.run_collectively(
        lambda: {role: role_layout(shapes.get(role, shape), role, **placed.grid) for role, placed in roles.items()}
    )


def _check_adapters(world: World, config: Config, shape: ModelShape, layout: Layout) -> None:
    lora = Lora.from_config(config.model)
    if lora is not None:
        world.run_collectively(lambda: check_adapters(shape, layout, lora))


def _groups(world: World, layouts: dict[str, Layout]) -> dict[str, RoleGroups]:
    platform.install()
    return make_groups(layouts, world.rank, GroupCache(world.rank, world.nccl_timeout))
