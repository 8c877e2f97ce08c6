"""Saving and resuming: the folder of checkpoints, each written under a temporary name and then renamed, its manifest,
and the sharded state inside. When to save is decided in `hpcrl.run`."""
