"""The reward of tool_countdown_cpu.yaml: the answer of the last turn counts, as in countdown without tools."""

from typing import Any

from hpcrl.rewards.scorers import countdown


def compute_score(
    data_source: str, solution_str: str, ground_truth: dict[str, Any], extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    last_turn = solution_str.rpartition("</tool_response>")[2]
    return countdown.compute_score(data_source, last_turn, ground_truth, extra_info)
