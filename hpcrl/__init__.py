"""Reinforcement-learning post-training of language models as one SPMD MPI program. Importing it imports nothing."""
