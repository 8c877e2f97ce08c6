"""A reward that differs between samples of an untrained model, for docs/tutorial.md in small."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str))
