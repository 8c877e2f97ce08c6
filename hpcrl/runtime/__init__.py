"""The ranks of the one SPMD program: MPI, torch.distributed, layouts and groups, devices, signals, hangs, exits. No
model and no job."""
