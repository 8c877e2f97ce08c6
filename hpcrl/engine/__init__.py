"""Training of one role's model over packed micro-batches: passes, optimizer, offload; beside it what takes its weights
elsewhere, refit and checkpoints. No role and no loss (`hpcrl.workers`, `hpcrl.algorithms`)."""
