"""From a config to this rank's workers: what it reads from files, layouts, groups, models, engines."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from hpcrl.config.derive import RoleLayouts
from hpcrl.config.roles import JUDGE, REWARD, RoleSpec
from hpcrl.config.schema import Config, ModelConfig
from hpcrl.controller.register import Worker
from hpcrl.data.answers import AnswerDataset
from hpcrl.data.image_loader import Dataset, ImageLoader
from hpcrl.data.judge_prompts import JudgePrompts
from hpcrl.data.prompts import PromptDataset
from hpcrl.data.supervision import SftDataset
from hpcrl.data.tokenizer import has_tokenizer, load_tokenizer, token_ids, tokenizer_of
from hpcrl.model.architecture import check_longest, check_towers, check_vision, shape_of
from hpcrl.model.params import check_adapters, role_layout
from hpcrl.model.shape import Lora, ModelShape
from hpcrl.rewards.manager import check_rewards
from hpcrl.rewards.registry import check_ground_truth
from hpcrl.rollout.environments.tools import data_config
from hpcrl.runtime import platform
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.groups import GroupCache, RoleGroups, make_groups
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.world import World

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpcrl.data.images import ImageProcessor

log = logging.getLogger(__name__)


@dataclass
class Inputs:
    """What every rank reads from files before models are built. Bad files end the job with one line."""

    shape: ModelShape  # the policy's, or that of the only model
    tokenizer: PreTrainedTokenizerBase | Any = None
    prompts: dict[str, PromptDataset] = field(default_factory=dict)  # "train", "val"
    sequences: dict[str, SftDataset] = field(default_factory=dict)  # "train", and "val" for its loss
    pairs: dict[str, AnswerDataset] = field(default_factory=dict)  # "train", and "val" for evaluations
    shapes: dict[str, ModelShape] = field(default_factory=dict)  # role -> shape, of models with one of their own
    images: ImageProcessor | None = None  # of a vision-language policy
    judge: JudgePrompts | None = None
    is_scored: bool = True  # whether responses get scores


@dataclass
class Team:
    """This rank's worker of each role that it is in; class and layout of every role."""

    world: World
    config: Config
    derived: RoleLayouts
    inputs: Inputs
    total_steps: int
    specs: dict[str, RoleSpec]
    layouts: dict[str, Layout]
    groups: dict[str, RoleGroups]
    workers: dict[str, Worker] = field(default_factory=dict)
    worker_classes: dict[str, type[Worker]] = field(default_factory=dict)

    def shape_of(self, role: str) -> ModelShape:
        return self.inputs.shapes.get(role, self.inputs.shape)

    def image_loaders(self, datasets: Mapping[str, Dataset]) -> dict[str, ImageLoader]:
        """What decodes the pictures of the dataset of each split; {} for a language model."""
        images = self.inputs.images
        if images is None:
            return {}
        num_workers = self.config.data.image_workers
        return {split: ImageLoader(dataset, images, num_workers) for split, dataset in datasets.items()}


def build_team(
    world: World, config: Config, derived: RoleLayouts, inputs: Inputs, roles: Sequence[RoleSpec], total_steps: int = 0
) -> Team:
    """Build this rank's workers, role by role in the given order. Collective over the world."""
    models = {spec.path: inputs.shapes.get(spec.name, inputs.shape) for spec in roles if spec.head is not None}
    world.run_collectively(lambda: check_towers(inputs.shape, models))
    layouts = world.run_collectively(
        lambda: {
            role: role_layout(inputs.shapes.get(role, inputs.shape), role, **placed.grid)
            for role, placed in derived.roles.items()
        }
    )
    lora = Lora.from_config(config.model)
    if lora is not None and "actor" in layouts:
        world.run_collectively(lambda: check_adapters(inputs.shape, layouts["actor"], lora))
    platform.install()
    groups = make_groups(layouts, world.rank, GroupCache(world.rank, world.nccl_timeout))
    specs = {spec.name: spec for spec in roles}
    team = Team(world, config, derived, inputs, total_steps, specs, dict(layouts), groups)
    for role, spec in specs.items():
        worker_class: type[Worker] = resolve_name(spec.worker) if isinstance(spec.worker, str) else spec.worker
        team.worker_classes[role] = worker_class
        if len(spec.on) == 1:
            team.layouts[role] = team.layouts[spec.on[0]]
        elif spec.on:  # single ranks over those of several roles
            team.layouts[role] = Layout(tuple(sorted({rank for on in spec.on for rank in team.layouts[on].ranks})))
        worker = worker_class.build(team, role)
        if worker is not None:
            team.workers[role] = worker
    return team


def read_training_inputs(config: Config, world: World) -> Inputs:
    """Tokenizer, prompts and shapes of all models; collective, because the ranks share the work."""
    inputs = read_generation_inputs(config, "train", world)
    add_validation_prompts(inputs, config, world)
    if config.distillation.enabled:
        inputs.shapes["teacher"] = teacher_shape(config, inputs.shape)
    return inputs


def add_validation_prompts(inputs: Inputs, config: Config, world: World, without: str = "") -> None:
    """Read data.val_files, and check that every prompt has a scorer. Collective.

    Args:
        without: the override with which no prompt needs a scorer, for the error.
    """
    data = data_config(config)
    if data.val_files:
        inputs.prompts["val"] = PromptDataset(
            data.val_files, inputs.tokenizer, data, data.val_max_samples, world, images=inputs.images
        )
    try:
        _check_scorers(inputs, config, world)
    except InputError as error:
        lines = [f"{line}; or set {without}" if without else line for line in error.lines]
        raise InputError(*lines, everywhere=error.everywhere) from None


def read_generation_inputs(config: Config, split: str, world: World, *, scored: bool = True) -> Inputs:
    """As `read_training_inputs`, of the one data set for which samples are drawn. Collective."""
    tokenizer, shape = read_model(config)
    data = data_config(config)
    files = {"train": (data.train_files, data.train_max_samples), "val": (data.val_files, data.val_max_samples)}[split]
    images = image_processor(config, shape)
    prompts = PromptDataset(files[0], tokenizer, data, files[1], world, images=images)
    inputs = Inputs(shape, tokenizer, {split: prompts}, images=images, is_scored=scored)
    if scored:
        if config.reward.reward_model.enable:
            inputs.shapes["reward"] = reward_shape(config, shape)
        if config.reward.judge.enable:
            inputs.judge = JudgePrompts(config)
            inputs.shapes["judge"] = judge_shape(config, inputs.judge)
        _check_scorers(inputs, config, world)
    return inputs


def judge_shape(config: Config, prompts: JudgePrompts) -> ModelShape:
    """The judge's architecture. Raises InputError if its context is too short."""
    cfg, shape = config.reward.judge, shape_with(prompts.tokenizer, JUDGE.architecture(config))
    longest = cfg.max_prompt_length + cfg.max_response_length
    shape.check_longest(longest, "reward.judge.max_prompt_length + max_response_length", "the judge")
    return shape


def _check_scorers(inputs: Inputs, config: Config, world: World) -> None:
    """Check rewards once per node, because only its kernel and its files make a difference. Collective."""

    def check() -> None:
        if world.local_rank == 0:
            sources = [source for dataset in inputs.prompts.values() for source in dataset.source_of_rows()]
            check_rewards(config.reward, sources)
            for dataset in inputs.prompts.values():
                for row, (source, truth) in enumerate(dataset.ground_truths()):
                    if config.reward.custom_reward_function.path is None:
                        check_ground_truth(source, truth, dataset.where(row))

    if config.uses_rules:
        world.run_collectively(check)
    if inputs.judge is not None:
        for dataset in inputs.prompts.values():
            inputs.judge.check_rows(dataset)


def read_model(config: Config) -> tuple[PreTrainedTokenizerBase, ModelShape]:
    tokenizer = tokenizer_of(config.model)
    shape = shape_with(tokenizer, config.model)
    check_longest(shape, config, "model")
    check_experts(shape, config)
    return tokenizer, shape


def shape_with(tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> ModelShape:
    """The shape of a model with its tokenizer. Logs a difference of their vocabularies."""
    ids = token_ids(tokenizer)
    size = max(ids) + 1
    shape = shape_of(model, size)
    if size < shape.vocab_size:
        log.info(
            "vocabulary: %d tokens of the tokenizer, %d rows in the model; the other %d %s",
            *(size, shape.vocab_size, shape.vocab_size - size),
            "are never drawn" if model.softmax_vocab == "tokenizer" else "can be drawn (model.softmax_vocab=config)",
        )
    if len(ids) < size:
        log.warning(
            "vocabulary: %d ids below %d, the largest of the tokenizer, have no token, and they can be drawn",
            *(size - len(ids), size - 1),
        )
    return shape


def shape_beside(model: ModelConfig, policy: ModelShape) -> ModelShape:
    """The shape of a model that reads the policy's tokens."""
    return replace(shape_of(model, policy.vocab_size), tokenizer_size=policy.tokenizer_size)


def image_processor(config: Config, shape: ModelShape) -> ImageProcessor | None:
    """What opens pictures for the policy; None for a language model. Raises InputError for settings that do not work
    with pictures."""
    if shape.vision is None:
        return None
    from hpcrl.data.images import ImageProcessor  # transformers' image processors, for jobs with pictures

    check_vision(config, shape.vision)
    return ImageProcessor.of_model(str(config.model.path), shape.vision, config.data)


def check_experts(shape: ModelShape, config: Config) -> None:
    """Raise InputError if the job has settings for experts and the model has none."""
    mode, moe = config.actor.router_replay.mode, config.model.moe
    wanted = {
        f"actor.router_replay.mode={mode}": mode != "disabled",
        f"model.moe.aux_loss_coeff={moe.aux_loss_coeff}": moe.aux_loss_coeff > 0,
        f"model.moe.z_loss_coeff={moe.z_loss_coeff}": moe.z_loss_coeff > 0,
    }
    for key, is_wanted in wanted.items():
        if is_wanted and shape.routed is None:
            raise InputError(f"{key} is for a mixture of experts, and the model has none; leave it out")


def reward_shape(config: Config, policy: ModelShape) -> ModelShape:
    """The reward model's architecture: its own, or the policy's."""
    shape = shape_beside(REWARD.architecture(config), policy)
    check_longest(shape, config, REWARD.path)
    return shape


def teacher_shape(config: Config, policy: ModelShape) -> ModelShape:
    """The teacher's architecture: its own, or the policy's. Both must have the same vocabulary."""
    loss, own = config.distillation.distillation_loss, config.teacher.model
    if loss.loss_mode == "forward_kl_topk" and loss.topk > policy.softmax_size:
        raise InputError(
            f"distillation.distillation_loss.topk={loss.topk} exceeds the vocabulary of {policy.softmax_size} tokens; "
            f"use {policy.softmax_size} or less"
        )
    if own is None:
        return policy
    if own.init_from is not None or own.tokenizer is not None:
        raise InputError(
            "teacher.model gives init_from or tokenizer; it takes an architecture or a path only: the tokenizer is "
            "the policy's, and weights are named by teacher.init_from"
        )
    if own.vocab_size not in (None, policy.vocab_size):
        raise InputError(
            f"teacher.model.vocab_size={own.vocab_size}, and the policy's vocabulary has {policy.vocab_size} tokens; "
            "a teacher must have the same: leave it null"
        )
    shape = shape_beside(own, policy)
    if shape.vocab_size != policy.vocab_size:
        raise InputError(
            f"teacher.model.path={own.path} has {shape.vocab_size} tokens, and the policy's vocabulary "
            f"{policy.vocab_size}; a teacher must have the same"
        )
    check_longest(shape, config, "teacher.model")
    return shape


def policy_shape(config: Config, *, is_run: bool) -> ModelShape:
    """The policy's shape, for jobs without prompts. The tokenizer is read if it defines the number of weights, or if
    the model is run and it says which ids have a probability."""
    model = config.model
    counts = model.path is None and model.vocab_size is None and not model.hf_config
    named = model.tokenizer or (model.path if model.path is not None and has_tokenizer(model.path) else None)
    if named is not None and (counts or (is_run and model.softmax_vocab == "tokenizer")):
        return shape_with(load_tokenizer(named), model)
    return shape_of(model, 0)
