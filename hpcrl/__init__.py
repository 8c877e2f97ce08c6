"""Reinforcement-learning post-training of language models as one SPMD MPI program. Importing it imports nothing."""

import os

if not os.path.isdir(os.path.join(os.path.dirname(__file__), "kernels")):
    # a checkout in which setup.py has not run, as beside an installed wheel: hpcrl.kernels stands beside this folder
    __path__.append(os.path.dirname(os.path.dirname(__file__)))
