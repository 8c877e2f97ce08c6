"""A reward function of your own: the score of one response. reward.custom_reward_function of a template names it.

It has verl's arguments and runs in a process of its own, with the time limit of reward.timeout. This one is for the
countdown task: make a target from given numbers, each used once. `5 8 5 2 6:` has the answer `<a>8+5-5-2</a>`.
"""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for a right answer, 0.1 for an expression of the given numbers that misses the target, else 0."""
    answer = re.fullmatch(r"<a>(\d(?:[+-]\d)*)</a>", solution_str.strip())
    terms = re.findall(r"[+-]?\d", answer[1]) if answer else []
    uses_all = sorted(abs(int(term)) for term in terms) == sorted(ground_truth["numbers"])
    is_right = uses_all and sum(map(int, terms)) == ground_truth["target"]
    return {"score": 1.0 if is_right else 0.1 * uses_all, "acc": float(is_right)}
