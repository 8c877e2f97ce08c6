"""Readers of the folder of a run, also of one that was killed, copied or made by others. No torch and no MPI."""
