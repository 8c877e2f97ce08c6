"""The native engine: continuous batching over a KV cache in torch, on CPUs and GPUs, with megatron's weights."""
