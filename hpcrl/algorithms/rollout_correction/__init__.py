"""Correction of the mismatch between rollout and training."""
