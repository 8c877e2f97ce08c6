"""What a job will need, computed on a login node: no MPI, no GPU, and torch only to build models without memory."""
