"""Walk to a place on a grid, a step in each turn. The answer is the direction in which it lies."""

import random

from hpcrl.api import Environment, Step

MOVES = {"n": (-1, 0), "s": (1, 0), "w": (0, -1), "e": (0, 1)}


class GridWorld(Environment):
    def __init__(self, side: int = 4, steps: int = 6):
        self.side, self.left = side, steps

    def reset(self, record, seed):
        cells = [(row, column) for row in range(self.side) for column in range(self.side)]
        self.place, self.goal = random.Random(seed).sample(cells, 2)
        return [{"role": "user", "content": f"It lies {self.direction()}."}]

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
        reward = 0.2 if self.distance() < before else -0.2
        is_over = not self.left or turn.is_last
        return Step([{"role": "user", "content": f"{self.direction()}."}], is_over, reward, {"acc": 0.0})

    def direction(self):
        names = [("north", "", "south"), ("west", "", "east")]
        ways = [(goal > at) - (goal < at) for at, goal in zip(self.place, self.goal, strict=True)]
        return " ".join(filter(None, (name[1 + way] for name, way in zip(names, ways, strict=True))))

    def distance(self):
        return sum(abs(at - goal) for at, goal in zip(self.place, self.goal, strict=True))
