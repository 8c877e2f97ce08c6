"""GPU kernels in Triton, packaged as `hpcrl.kernels`.

`name.py` holds a function, its plain-torch reference, which is also what the CPU runs, and the choice between that and
the kernels in `name_triton.py`, which nothing else imports: Triton is not everywhere.
"""
