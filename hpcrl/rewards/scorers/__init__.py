"""Scorers: an answer and a ground truth in, a score out. A new one is a file here; no processes and no config."""
