"""Scorers: an answer and a ground truth in, a score out; no processes and no config.

A new one is a function with `@reads(...)` in a file here, and a line in `RULES` of `hpcrl/rewards/registry.py`.
"""
