"""Where a step's samples come from: synchronous, recorded, one step off, or streaming; and their scores. Rank 0's side
only: generation itself is in `hpcrl.workers.rollout`."""
