"""Scores of responses: the manager, its processes, which scorer each data source has, and the questions to a judge. No
prompts and no engine."""
