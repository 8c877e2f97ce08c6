"""Accuracy of a judge on questions whose answers are known (configs/sft_judge_countdown_cpu.yaml)."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)
