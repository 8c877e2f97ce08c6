"""Scores of responses: the manager, its processes, the rule of each data source, and the questions to a judge. No
prompts and no engine."""
