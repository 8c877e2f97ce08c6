"""Optimizers, a file each: parameters, state, step and cost. No rank and no model; imported without torch."""
