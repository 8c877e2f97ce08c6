"""Output of a run: TensorBoard, metrics.jsonl, timers, progress, the rollout archive."""
