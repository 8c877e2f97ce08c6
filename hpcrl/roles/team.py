"""From a config to the workers of this rank: layouts, groups, models, engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcrl.config.derive import Derived, DerivedGenerate, DerivedRm, DerivedSft
from hpcrl.config.placement import PlacedRole, architecture
from hpcrl.config.schema import Config, DataConfig
from hpcrl.controller.worker import Worker
from hpcrl.data.preference import PreferenceDataset
from hpcrl.data.prompts import PromptDataset
from hpcrl.data.sft import SftDataset
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.grid.groups import RoleGroups, make_groups
from hpcrl.grid.layout import Layout
from hpcrl.launch import platform
from hpcrl.launch.exits import InputError
from hpcrl.launch.job import run_directory
from hpcrl.launch.waiting import create_group
from hpcrl.launch.world import World
from hpcrl.model.shape import ModelShape
from hpcrl.rewards.manager import RewardManager, asks_rules, check_rewards
from hpcrl.roles.actor import ActorWorker
from hpcrl.roles.archive import ArchiveWorker
from hpcrl.roles.critic import CriticWorker
from hpcrl.roles.generations import GenerationsWorker
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


def read_inputs(config: Config, *, sft: bool = False) -> Inputs:
    """Tokenizer, datasets and the model's shape."""
    tokenizer, shape = _read_model(config)
    data = _data_config(config)
    answers = None
    if sft:
        answers = SftDataset(data.train_files, tokenizer, data, config.sft.answer_key, data.train_max_samples)
        prompts = {"train": answers.prompts}
    else:
        prompts = {"train": PromptDataset(data.train_files, tokenizer, data, data.train_max_samples)}
    if data.val_files:
        prompts["val"] = PromptDataset(data.val_files, tokenizer, data, data.val_max_samples)
    check_rewards(config.reward, [source for dataset in prompts.values() for source in dataset.data_sources()])
    others = {}
    if config.distillation.enabled and not sft:
        others["teacher"] = teacher_shape(config, shape)
    if config.reward.reward_model.enable and not sft:
        others["reward"] = ModelShape.from_config(architecture(config, "reward"), shape.vocab_size)
    return Inputs(tokenizer, prompts, answers, shape, others)


def read_generation_inputs(config: Config, split: str, *, scored: bool = True) -> Inputs:
    """As `read_inputs`, of the one data set that samples are drawn for."""
    tokenizer, shape = _read_model(config)
    data = _data_config(config)
    files = {"train": (data.train_files, data.train_max_samples), "val": (data.val_files, data.val_max_samples)}[split]
    prompts = PromptDataset(files[0], tokenizer, data, files[1])
    others = {}
    if scored:
        check_rewards(config.reward, prompts.data_sources())
        if config.reward.reward_model.enable:
            others["reward"] = ModelShape.from_config(architecture(config, "reward"), shape.vocab_size)
    return Inputs(tokenizer, {split: prompts}, None, shape, others)


def read_rm_inputs(config: Config) -> RmInputs:
    """As `read_inputs`, for `hpcrl rm`."""
    tokenizer, shape = _read_model(config)
    shape = ModelShape.from_config(architecture(config, "reward"), shape.vocab_size)
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
    if config.model.path is not None:
        raise InputError(
            f"model.path={config.model.path}: Hugging Face weights cannot be loaded yet; leave it null, give the "
            "architecture under model: and start weights as model.init_from"
        )
    if config.model.tokenizer is None:
        raise InputError("model.tokenizer is null; name a tokenizer directory")
    tokenizer = load_tokenizer(config.model.tokenizer)
    return tokenizer, ModelShape.from_config(config.model, len(tokenizer))


def build_team(world: World, config: Config, derived: Derived, inputs: Inputs, total_steps: int) -> Team:
    """Workers of `hpcrl train`. Collective over the world."""
    shape = inputs.shape
    layouts = {role: _layout(placed) for role, placed in derived.roles.items()}
    groups = _groups(world, layouts)
    kinds: dict[str, type[Worker]] = {"actor": ActorWorker}
    workers: dict[str, Worker] = {}
    if "actor" in groups:
        workers["actor"] = ActorWorker(groups["actor"], shape, config, derived, total_steps)
    if derived.needs_critic:
        kinds["critic"] = CriticWorker
        if "critic" in groups:
            workers["critic"] = CriticWorker(groups["critic"], shape, config, derived, total_steps)
    if derived.needs_ref:
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
    layouts["archive"], kinds["archive"] = layouts["actor"], ArchiveWorker
    if world.rank in layouts["archive"]:
        folder = str(run_directory(config) / "rollouts")
        workers["archive"] = ArchiveWorker(layouts["archive"], world.rank, folder, inputs.prompts)
    team = Team(workers, kinds, layouts)
    _add_sampling(world, config, inputs, team, groups)
    return team


def build_generation_team(
    world: World, config: Config, derived: DerivedGenerate, inputs: Inputs, *, scored: bool = True
) -> Team:
    """Workers of `hpcrl generate` and `hpcrl evaluate`. Collective over the world."""
    layouts = {role: _layout(placed) for role, placed in derived.roles.items()}
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
    layouts = {role: _layout(placed) for role, placed in derived.roles.items()}
    groups = _groups(world, layouts)
    kinds: dict[str, type[Worker]] = {"actor": SftActorWorker, "data": SftDataWorker}
    workers: dict[str, Worker] = {}
    layouts["data"] = layouts["actor"]
    if "actor" in groups:
        workers["actor"] = SftActorWorker(groups["actor"], inputs.shape, config)
        workers["data"] = SftDataWorker(layouts["actor"], world.rank, inputs.answers)
    team = Team(workers, kinds, layouts)
    if "rollout" in layouts:
        _add_sampling(world, config, inputs, team, groups)
    return team


def build_rm_team(world: World, config: Config, derived: DerivedRm, inputs: RmInputs) -> Team:
    """Workers of `hpcrl rm`. Collective over the world."""
    layouts = {role: _layout(placed) for role, placed in derived.roles.items()}
    groups = _groups(world, layouts)
    kinds: dict[str, type[Worker]] = {"reward": PreferenceWorker, "data": PreferenceDataWorker}
    workers: dict[str, Worker] = {}
    layouts["data"] = layouts["reward"]
    if "reward" in groups:
        workers["reward"] = PreferenceWorker(groups["reward"], inputs.shape, config)
        workers["data"] = PreferenceDataWorker(layouts["data"], world.rank, inputs.pairs)
    return Team(workers, kinds, layouts)


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
            alias=config.rollout.checkpoint_engine.alias and config.async_training.mode == "sync",
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


def _layout(placed: PlacedRole) -> Layout:
    return Layout(placed.ranks, tp=placed.tp, pp=placed.pp)


def _groups(world: World, layouts: dict[str, Layout]) -> dict[str, RoleGroups]:
    platform.install()
    return make_groups(layouts, world.rank)
