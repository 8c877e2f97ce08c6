"""Training of one role's model over packed micro-batches: passes, optimizers, offload; beside it what takes its weights
elsewhere, refit and checkpoints. No role and no loss (`hpcrl.workers`, `hpcrl.algorithms`); generation engines are in
`hpcrl.rollout.engines`."""
