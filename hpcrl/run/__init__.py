"""The life-cycle that every job gets: start, time budget, checkpoints, validation, metrics, logs."""
