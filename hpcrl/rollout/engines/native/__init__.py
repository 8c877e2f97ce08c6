"""The built-in engine: continuous batching over a KV cache and its decode steps, in torch, on CPUs and GPUs, with
megatron's weights."""
