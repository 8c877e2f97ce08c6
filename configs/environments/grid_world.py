"""Find a hidden place on a grid: each step is answered by whether it came nearer."""

import random

from hpcrl.api import Environment, Step

MOVES = {"n": (-1, 0), "s": (1, 0), "w": (0, -1), "e": (0, 1)}


class GridWorld(Environment):
    def __init__(self, side: int = 5, steps: int = 8):
        self.side, self.left = side, steps

    def reset(self, record, seed):
        rng = random.Random(seed)
        cells = [(row, column) for row in range(self.side) for column in range(self.side)]
        self.place, self.goal = rng.sample(cells, 2)
        return [{"role": "user", "content": f"Find it: {self.side} x {self.side}, you are at {self.where()}."}]

    def step(self, turn):
        self.left -= 1
        move = MOVES.get(turn.text.strip())
        if move is None:
            return Step(done=True, reward=-0.5, info={"acc": 0.0})
        before = self.distance()
        row, column = (min(max(at + by, 0), self.side - 1) for at, by in zip(self.place, move, strict=True))
        self.place = row, column
        if self.place == self.goal:
            return Step(done=True, reward=1.0, info={"acc": 1.0, "steps_left": self.left})
        nearer = self.distance() < before
        answer = f"{'nearer' if nearer else 'not nearer'}, {self.where()}"
        is_over = not self.left or turn.is_last
        return Step([{"role": "user", "content": answer}], is_over, 0.1 if nearer else -0.1, {"acc": 0.0})

    def where(self):
        return "{} {}".format(*self.place)

    def distance(self):
        return sum(abs(at - goal) for at, goal in zip(self.place, self.goal, strict=True))
