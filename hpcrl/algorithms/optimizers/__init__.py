"""Optimizers, a file each: parameters, state, step and cost. No rank and no model; the folder is imported without torch."""
