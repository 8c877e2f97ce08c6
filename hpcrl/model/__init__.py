"""Models: shape, parameters, megatron modules, and the functions that the native rollout engine shares with them."""
