"""Rank 0 as the controller: commands, futures, and the columns that move between the ranks that have and need them. No
algorithm, no model, no loop."""
