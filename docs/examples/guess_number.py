"""A number between 1 and 9 is to be found in a few guesses, each of which is answered by `higher` or `lower`."""

import random
import re

from hpcrl.api import Environment, Step


class GuessNumber(Environment):
    def __init__(self, highest: int = 9, guesses: int = 4):
        self.highest, self.left = highest, guesses

    def reset(self, record, seed):
        self.number = random.Random(seed).randint(1, self.highest)
        return [{"role": "user", "content": f"Guess my number, 1 to {self.highest}."}]

    def step(self, turn):
        found = re.search(r"\d+", turn.text)
        self.left -= 1
        if found is None:
            return Step(done=True, reward=-0.5, info={"acc": 0.0})
        guess = int(found[0])
        if guess == self.number:
            return Step(done=True, reward=1.0, info={"acc": 1.0, "guesses_left": self.left})
        if not self.left or turn.is_cut:
            return Step(done=True, info={"acc": 0.0})
        hint = "higher" if guess < self.number else "lower"
        return Step([{"role": "user", "content": hint}])
