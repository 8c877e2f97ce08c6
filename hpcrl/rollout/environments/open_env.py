"""Environments of OpenEnv (https://github.com/huggingface/OpenEnv), in process or behind a server on this node."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

from hpcrl.rollout.environments.environment import Environment, Message, Step, Turn


class OpenEnvEnvironment(Environment):
    """An environment of the package `openenv`. Needs the extra `openenv`.

    What is no action costs a turn. The sample's accuracy is 1 if the sum of rewards is at least `solved`.

    Args:
        source: the address of a server, such as http://127.0.0.1:8000; or `module:Class` of an environment that is made
            in this process, and `action` the same of its actions.
        action_field: the field of an action that has the text of a turn; "": the model writes the action as JSON.
        text_field: the field of an observation that the model reads; "": all of them, as JSON.
    """

    def __init__(
        self, source: str, action: str = "", action_field: str = "", text_field: str = "", solved: float = 1.0
    ) -> None:
        from openenv.core import GenericEnvClient

        self.action_field, self.text_field, self.solved, self.total = action_field, text_field, solved, 0.0
        self.env = GenericEnvClient(source).sync() if "://" in source else InProcess(source, action)

    @classmethod
    def check(cls) -> None:
        import openenv.core  # noqa: F401  an ImportError names what is missing

    def reset(self, record: dict[str, Any], seed: int) -> Sequence[Message]:
        return self._messages(self.env.reset(seed=seed).observation)

    def step(self, turn: Turn) -> Step:
        try:
            result = self.env.step({self.action_field: turn.text} if self.action_field else as_object(turn.text))
            messages, reward, done = self._messages(result.observation), float(result.reward or 0.0), result.done
        except (NoAction, RuntimeError) as error:
            if not isinstance(error, NoAction) and "VALIDATION_ERROR" not in str(error):  # of the client
                raise
            messages, reward, done = [{"role": "user", "content": f"no action: {str(error)[:200]}"}], 0.0, False
        self.total += reward
        info = {"acc": float(self.total >= self.solved), "return": self.total}
        return Step(messages, done or turn.is_last, reward, info)

    def close(self) -> None:
        self.env.close()

    def _messages(self, observation: dict[str, Any]) -> Sequence[Message]:
        fields = {name: value for name, value in observation.items() if name != "metadata"}
        text = fields[self.text_field] if self.text_field else json.dumps(fields, default=str)
        return [{"role": "user", "content": str(text)}]


class NoAction(Exception):
    """What the model wrote is no action."""


class InProcess:
    """The methods of OpenEnv's client, for an environment in this process."""

    def __init__(self, source: str, action: str) -> None:
        self.env, self.action = resolve_name(source)(), resolve_name(action)

    def reset(self, seed: int) -> Any:
        return self._result(self.env.reset(seed=seed))

    def step(self, action: dict[str, Any]) -> Any:
        from openenv.core.env_server.serialization import deserialize_action

        try:
            made = deserialize_action(action, self.action)
        except ValueError as error:
            raise NoAction(str(error)) from None
        return self._result(self.env.step(made))

    def close(self) -> None:
        self.env.close()

    def _result(self, observation: Any) -> Any:
        from openenv.core.client_types import StepResult
        from openenv.core.env_server.serialization import serialize_observation

        return StepResult(**serialize_observation(observation))


def as_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise NoAction(f"{text[:80]!r} is not a JSON object")
    return found
