"""The files that a job reads, by the config key that names them: for checks before a job queues and for staging."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from hpcrl.config.schema import Config

MODELS = ("teacher", "reward.reward_model", "reward.judge")  # sections of roles with a model of their own
# those whose value may be null; the two of data and run.plugins are lists
KEYS = (
    "run.plugins",
    "run.job_file",
    "job.machine",
    "model.path",
    "model.tokenizer",
    "model.init_from",
    "data.train_files",
    "data.val_files",
    "data.sampler.class_path",
    "rollout.multi_turn.function_tool_path",
    "rollout.multi_turn.interaction_path",
    "rollout.multi_turn.environment.path",
    "rollout.trtllm.model_dir",
    *(f"{role}.{key}" for role in MODELS for key in ("init_from", "model.path", "model.tokenizer")),
    "reward.judge.template_path",
    "reward.custom_reward_function.path",
    "trainer.rollouts_from",
    "score.tokens_path",
)


class Input(NamedTuple):
    key: str
    path: str  # of a file or a folder, as the config has it


def inputs(config: Config) -> Iterator[Input]:
    """Every file and folder that the config names, once per mention."""
    for key in KEYS:
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name, None)
        for path in [value] if isinstance(value, str) else value or ():
            if key != "job.machine" or is_machine_file(path):
                yield Input(key, file_of(key, path))


def missing(config: Config) -> list[Input]:
    """Those that are not there."""
    return [given for given in inputs(config) if not os.path.exists(given.path)]


def is_machine_file(machine: str) -> bool:
    """Whether job.machine is a file, and not the name of one in configs/machines."""
    return machine.endswith((".yaml", ".yml"))


def file_of(key: str, path: str) -> str:
    """The file in a key's value: a reward function may follow its file, as in `my_reward.py:compute_score`."""
    head, colon, _ = path.rpartition(":")
    return head if key == "reward.custom_reward_function.path" and colon and head.endswith(".py") else path
