"""Guess a number from "higher" and "lower": more guesses than one turn has."""

import random
import re

from hpcrl.api import Environment, Step


class GuessNumber(Environment):
    def __init__(self, highest: int = 9, guesses: int = 4):
        self.low, self.high, self.left = 1, highest, guesses

    def reset(self, record, seed):
        self.number = random.Random(seed).randint(self.low, self.high)
        return [{"role": "user", "content": f"Guess my number, {self.state}."}]

    @property
    def state(self):
        return f"{self.low} to {self.high}"

    def step(self, turn):
        found = re.search(r"\d+", turn.text)
        self.left -= 1
        if found is None:
            return Step(done=True, reward=-0.5, info={"acc": 0.0})
        guess = int(found[0])
        if guess == self.number:
            return Step(done=True, reward=1.0, info={"acc": 1.0, "guesses_left": self.left})
        if not self.left or turn.is_last:
            return Step(done=True, info={"acc": 0.0})
        reward = 0.0 if self.low <= guess <= self.high else -0.25
        if guess < self.number:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        answer = "higher" if guess < self.number else "lower"
        return Step([{"role": "user", "content": f"{answer}, {self.state}"}], reward=reward)
