"""The names that a job, a role, an algorithm or a reward in a file of your own needs. They are stable.

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
    from hpcrl.algorithms.parameters import param as param
    from hpcrl.algorithms.policy_losses import register_policy_loss as register_policy_loss
    from hpcrl.batch.data_proto import DataProto as DataProto
    from hpcrl.batch.ragged import Ragged as Ragged
    from hpcrl.config.roles import RoleSpec as RoleSpec
    from hpcrl.config.schema import ModelConfig as ModelConfig
    from hpcrl.config.schema import Section as Section
    from hpcrl.controller.register import Dispatch as Dispatch
    from hpcrl.controller.register import Worker as Worker
    from hpcrl.controller.register import register as register
    from hpcrl.jobs.train import Train as Train
    from hpcrl.rewards.manager import RewardManager as RewardManager
    from hpcrl.rewards.manager import register_reward_manager as register_reward_manager
    from hpcrl.rollout.protocol import SamplingParams as SamplingParams
    from hpcrl.run.job import TrainingJob as TrainingJob
    from hpcrl.run.run import Run as Run
    from hpcrl.workers.actor import ActorWorker as ActorWorker
    from hpcrl.workers.critic import CriticWorker as CriticWorker
    from hpcrl.workers.frozen import RefWorker as RefWorker
    from hpcrl.workers.model_worker import ModelWorker as ModelWorker
    from hpcrl.workers.rollout import RolloutWorker as RolloutWorker
    from hpcrl.workers.scorer import ScorerWorker as ScorerWorker
    from hpcrl.workers.weight_transfer import RefitWorker as RefitWorker

_MODULES = {
    # jobs
    "TrainingJob": "hpcrl.run.job",
    "Train": "hpcrl.jobs.train",
    "Run": "hpcrl.run.run",
    "Section": "hpcrl.config.schema",
    "ModelConfig": "hpcrl.config.schema",
    "Field": "pydantic",
    # roles
    "RoleSpec": "hpcrl.config.roles",
    "Worker": "hpcrl.controller.register",
    "register": "hpcrl.controller.register",
    "Dispatch": "hpcrl.controller.register",
    # batches
    "DataProto": "hpcrl.batch.data_proto",
    "Ragged": "hpcrl.batch.ragged",
    "SamplingParams": "hpcrl.rollout.protocol",
    # algorithms; `param` declares a parameter of theirs
    "param": "hpcrl.algorithms.parameters",
    "register_reward_manager": "hpcrl.rewards.manager",
    "RewardManager": "hpcrl.rewards.manager",
    "register_policy_loss": "hpcrl.algorithms.policy_losses",
    "register_adv_est": "hpcrl.algorithms.advantages",
    "agg_loss": "hpcrl.algorithms.aggregation",
    "Mean": "hpcrl.algorithms.metrics",
    "Sum": "hpcrl.algorithms.metrics",
}
_WORKERS = {  # with megatron-core
    "ModelWorker": "hpcrl.workers.model_worker",
    "ActorWorker": "hpcrl.workers.actor",
    "CriticWorker": "hpcrl.workers.critic",
    "RefWorker": "hpcrl.workers.frozen",
    "RolloutWorker": "hpcrl.workers.rollout",
    "ScorerWorker": "hpcrl.workers.scorer",
    "RefitWorker": "hpcrl.workers.weight_transfer",
}

__all__ = sorted([*_MODULES, *_WORKERS])  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _WORKERS:
        from hpcrl.runtime import platform

        platform.import_megatron()
        return getattr(import_module(_WORKERS[name]), name)
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"hpcrl.api has no {name!r}; it has {', '.join(__all__)}")
