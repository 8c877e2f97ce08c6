"""The names that a job, a role, an algorithm or a reward in a file of your own needs, and a notebook. They are stable.

Names are imported when they are first used: a file that only declares parameters does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import Field as Field

    from hpcrl.algorithms.advantages import register_adv_est as register_adv_est
    from hpcrl.algorithms.aggregation import agg_loss as agg_loss
    from hpcrl.algorithms.metrics import Mean as Mean
    from hpcrl.algorithms.metrics import Sum as Sum
    from hpcrl.algorithms.optimizers.optimizer import Optimizer as Optimizer
    from hpcrl.algorithms.optimizers.optimizer import register_optimizer as register_optimizer
    from hpcrl.algorithms.parameters import param as param
    from hpcrl.algorithms.policy_losses import register_policy_loss as register_policy_loss
    from hpcrl.batch.data_proto import DataProto as DataProto
    from hpcrl.batch.ragged import Ragged as Ragged
    from hpcrl.config.engines import register_engine as register_engine
    from hpcrl.config.paths import PathStr as PathStr
    from hpcrl.config.roles import RoleSpec as RoleSpec
    from hpcrl.config.schema import ModelConfig as ModelConfig
    from hpcrl.config.schema import Section as Section
    from hpcrl.controller.register import Dispatch as Dispatch
    from hpcrl.controller.register import Worker as Worker
    from hpcrl.controller.register import register as register
    from hpcrl.jobs.train import Train as Train
    from hpcrl.model.families.config_json import hf_config as hf_config
    from hpcrl.model.hf_files import hf_shards as hf_shards
    from hpcrl.observe.read.comparison import Comparison as Comparison
    from hpcrl.observe.read.comparison import compare_evaluations as compare_evaluations
    from hpcrl.observe.read.runlog import RunLog as RunLog
    from hpcrl.observe.read.runlog import read_run as read_run
    from hpcrl.observe.read.runlog import read_runs as read_runs
    from hpcrl.observe.report.pictures import plot_comparison as plot_comparison
    from hpcrl.observe.report.pictures import plot_runs as plot_runs
    from hpcrl.rewards.manager import RewardManager as RewardManager
    from hpcrl.rewards.manager import register_reward_manager as register_reward_manager
    from hpcrl.rollout.engines.engine import Engine as Engine
    from hpcrl.rollout.environments.agent_environment import AgentEnvironment as AgentEnvironment
    from hpcrl.rollout.environments.environment import Environment as Environment
    from hpcrl.rollout.environments.environment import Step as Step
    from hpcrl.rollout.environments.environment import Turn as Turn
    from hpcrl.rollout.environments.gymnasium_environment import GymnasiumEnvironment as GymnasiumEnvironment
    from hpcrl.rollout.environments.mcp_tools import McpTools as McpTools
    from hpcrl.rollout.environments.open_env import OpenEnvEnvironment as OpenEnvEnvironment
    from hpcrl.rollout.environments.shell_task import ShellTask as ShellTask
    from hpcrl.rollout.environments.tools import tool as tool
    from hpcrl.rollout.environments.verifiers_environment import VerifiersEnvironment as VerifiersEnvironment
    from hpcrl.rollout.protocol import Completion as Completion
    from hpcrl.rollout.protocol import Request as Request
    from hpcrl.rollout.protocol import RolloutEngine as RolloutEngine
    from hpcrl.rollout.protocol import SamplingParams as SamplingParams
    from hpcrl.rollout.protocol import completed as completed
    from hpcrl.rollout.sampling import Drawn as Drawn
    from hpcrl.rollout.sampling import KeyedSampler as KeyedSampler
    from hpcrl.run.job import TrainingJob as TrainingJob
    from hpcrl.run.run import Run as Run
    from hpcrl.runtime.exits import InputError as InputError
    from hpcrl.workers.actor import ActorWorker as ActorWorker
    from hpcrl.workers.actor import CriticWorker as CriticWorker
    from hpcrl.workers.frozen import RefWorker as RefWorker
    from hpcrl.workers.model_worker import ModelWorker as ModelWorker
    from hpcrl.workers.rollout import RolloutWorker as RolloutWorker
    from hpcrl.workers.scorer import ScorerWorker as ScorerWorker
    from hpcrl.workers.weight_transfer import RefitWorker as RefitWorker

_MODULES = {
    # jobs
    "hpcrl.run.job": ("TrainingJob",),
    "hpcrl.jobs.train": ("Train",),
    "hpcrl.run.run": ("Run",),
    "hpcrl.config.schema": ("Section", "ModelConfig"),
    "hpcrl.config.paths": ("PathStr",),
    "pydantic": ("Field",),
    # roles
    "hpcrl.config.roles": ("RoleSpec",),
    "hpcrl.controller.register": ("Worker", "register", "Dispatch"),
    "hpcrl.workers.model_worker": ("ModelWorker",),
    "hpcrl.workers.actor": ("ActorWorker", "CriticWorker"),
    "hpcrl.workers.frozen": ("RefWorker",),
    "hpcrl.workers.rollout": ("RolloutWorker",),
    "hpcrl.workers.scorer": ("ScorerWorker",),
    "hpcrl.workers.weight_transfer": ("RefitWorker",),
    # batches
    "hpcrl.batch.data_proto": ("DataProto",),
    "hpcrl.batch.ragged": ("Ragged",),
    "hpcrl.rollout.protocol": ("SamplingParams", "Request", "Completion", "RolloutEngine", "completed"),
    # rollout engines
    "hpcrl.config.engines": ("register_engine",),
    "hpcrl.rollout.engines.engine": ("Engine",),
    "hpcrl.rollout.sampling": ("KeyedSampler", "Drawn"),
    "hpcrl.model.hf_files": ("hf_shards",),
    "hpcrl.model.families.config_json": ("hf_config",),
    "hpcrl.runtime.exits": ("InputError",),
    # environments
    "hpcrl.rollout.environments.environment": ("Environment", "Step", "Turn"),
    "hpcrl.rollout.environments.shell_task": ("ShellTask",),
    "hpcrl.rollout.environments.mcp_tools": ("McpTools",),
    "hpcrl.rollout.environments.agent_environment": ("AgentEnvironment",),
    "hpcrl.rollout.environments.verifiers_environment": ("VerifiersEnvironment",),
    "hpcrl.rollout.environments.gymnasium_environment": ("GymnasiumEnvironment",),
    "hpcrl.rollout.environments.open_env": ("OpenEnvEnvironment",),
    "hpcrl.rollout.environments.tools": ("tool",),
    # algorithms; `param` declares a parameter of theirs
    "hpcrl.algorithms.parameters": ("param",),
    "hpcrl.algorithms.optimizers.optimizer": ("register_optimizer", "Optimizer"),
    "hpcrl.rewards.manager": ("register_reward_manager", "RewardManager"),
    "hpcrl.algorithms.policy_losses": ("register_policy_loss",),
    "hpcrl.algorithms.advantages": ("register_adv_est",),
    "hpcrl.algorithms.aggregation": ("agg_loss",),
    "hpcrl.algorithms.metrics": ("Mean", "Sum"),
    # runs that were logged
    "hpcrl.observe.read.runlog": ("read_run", "read_runs", "RunLog"),
    "hpcrl.observe.report.pictures": ("plot_runs", "plot_comparison"),
    # evaluations of runs
    "hpcrl.observe.read.comparison": ("compare_evaluations", "Comparison"),
}

__all__ = sorted(name for names in _MODULES.values() for name in names)  # noqa: PLE0605


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"hpcrl.api has no {name!r}; it has {', '.join(__all__)}")
    if module.startswith("hpcrl.workers."):
        from hpcrl.runtime import platform

        platform.import_megatron()
    return getattr(import_module(module), name)
