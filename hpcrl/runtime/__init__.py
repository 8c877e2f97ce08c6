"""Start-up of the one SPMD program: MPI, torch.distributed, devices, signals and exits."""
