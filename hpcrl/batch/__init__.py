"""The batch of a step as columns, and its division over replicas, mini-batches and micro-batches. No messages between
ranks (`hpcrl.controller`), and nothing of a model."""
