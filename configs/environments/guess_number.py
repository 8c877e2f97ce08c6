"""Guess a number, a guess in each turn. A wrong guess costs half of the share of numbers that are still possible."""

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
            return Step(done=True, reward=-2.0, info={"acc": 0.0})
        guess = int(found[0])
        if guess == self.number:
            return Step(done=True, reward=1.0, info={"acc": 1.0, "guesses_left": self.left})
        before = self.high - self.low + 1
        if guess < self.number:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        answer = "higher" if guess < self.number else "lower"
        left = (self.high - self.low + 1) / before
        is_over = not self.left or turn.is_last
        return Step([{"role": "user", "content": f"{answer}, {self.state}"}], is_over, -left / 2, {"acc": 0.0})
