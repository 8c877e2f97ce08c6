"""Environments of Gymnasium (https://gymnasium.farama.org) whose observations and actions can be written as text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from hpcrl.rollout.environments.environment import Environment, Message, Step, Turn

COLOURED = re.compile(r"\x1b\[\d(\d)[\d;]*m(.*?)\x1b\[0m")  # how a rendering marks a place
COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white", "grey", "grey")


class GymnasiumEnvironment(Environment):
    """The environment `id`, as `gymnasium.make` makes it with the other arguments. Needs the extra `gymnasium`.

    The model reads the rendering where `render_mode` is "ansi", with colours as words, else the observation: text as it
    is, other values as JSON. It writes text for a space `Text`; else one of `actions`, names separated by
    spaces in the order of a space `Discrete`, the last in its turn; without names the action as JSON. What is no action
    costs a turn. The sample's accuracy is 1 if the sum of rewards is at least `solved`.
    """

    def __init__(self, id: str, actions: str = "", solved: float = 1.0, **options: Any) -> None:
        import gymnasium

        self.env = gymnasium.make(id, **options)
        self.actions, self.solved, self.total = actions.lower().split(), solved, 0.0

    @classmethod
    def check(cls) -> None:
        import gymnasium  # noqa: F401  an ImportError names what is missing

    def reset(self, record: dict[str, Any], seed: int) -> Sequence[Message]:
        observation, _ = self.env.reset(seed=seed)
        return [{"role": "user", "content": self._text(observation)}]

    def step(self, turn: Turn) -> Step:
        try:
            action = self._action(turn.text)
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
            expected = f"one of {', '.join(self.actions)}" if self.actions else f"JSON of {self.env.action_space}"
            return self._step(f"expected {expected}", turn.is_last, 0.0)
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return self._step(self._text(observation), terminated or truncated or turn.is_last, float(reward))

    def close(self) -> None:
        self.env.close()

    def _step(self, text: str, done: bool, reward: float) -> Step:
        self.total += reward
        info = {"acc": float(self.total >= self.solved), "return": self.total}
        return Step([{"role": "user", "content": text}], done, reward, info)

    def _action(self, text: str) -> Any:
        import gymnasium

        space = self.env.action_space
        if isinstance(space, gymnasium.spaces.Text):
            if text not in space:
                raise ValueError(f"{text!r} is not in {space}")
            return text
        if self.actions:
            *_, last = (word for word in re.findall(r"[\w-]+", text.lower()) if word in self.actions)
            return int(getattr(space, "start", 0)) + self.actions.index(last)
        (action,) = space.from_jsonable([json.loads(text)])
        if action not in space:
            raise ValueError(f"{action} is not in {space}")
        return action

    def _text(self, observation: Any) -> str:
        if self.env.render_mode == "ansi":
            observation = COLOURED.sub(lambda found: f"[{COLOURS[int(found[1])]} {found[2]}]", str(self.env.render()))
        if isinstance(observation, str):
            return observation
        return json.dumps(observation, default=lambda value: value.tolist())
