"""Bytes that every rank holds in each phase of a step, that a refit moves, and that a run writes. No seconds."""
