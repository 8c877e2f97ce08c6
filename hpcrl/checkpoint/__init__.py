"""Saving and resuming: the folder of checkpoints, its manifest, and the sharded state inside."""
