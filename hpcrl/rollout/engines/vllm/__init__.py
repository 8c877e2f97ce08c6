"""vLLM in the ranks of the job: its engine core in each rank's process, over the job's process groups. Refit writes
into vLLM's own parameters; tokens are drawn here, by the same keys as in the native engine."""
