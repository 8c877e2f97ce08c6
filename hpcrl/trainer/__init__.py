"""The loops, on rank 0."""
