"""Rules: an answer and a ground truth in, a score out. A new scorer is a file here; no processes and no config."""
