"""Writers while a job runs: metrics, TensorBoard, trackers, progress, the rollout archive. No reader of finished
runs."""
