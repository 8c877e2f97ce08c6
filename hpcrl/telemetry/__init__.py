"""What a run leaves behind for people: TensorBoard, metrics.jsonl, timers, progress, the rollout archive."""
