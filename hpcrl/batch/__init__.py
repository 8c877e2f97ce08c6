"""The batch of a step: columns, and how its samples are divided over replicas and micro-batches."""
