"""GPU kernels in Triton, packaged as `hpcrl.kernels`.

`name.py` holds functions, their plain-torch references, which the CPU runs, and the choice between those and the
kernels in `name_triton.py`, which nothing else imports: Triton is not available everywhere.
"""
