"""What a job will need, computed on a login node: no MPI, no torch, no GPU."""
