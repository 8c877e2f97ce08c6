"""The life-cycle that every job gets: start, time budget, saves, exports with their cards, validation, metrics, replay.
No algorithm; loops are in `hpcrl.jobs`, and ranks with their signals and hangs in `hpcrl.runtime`."""
