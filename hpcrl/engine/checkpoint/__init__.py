"""Saving and resuming: the folder of checkpoints, its manifest, and the sharded state inside. When to save is decided
in `hpcrl.run`."""
