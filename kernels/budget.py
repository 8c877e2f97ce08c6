"""Temporary memory of kernels, for memory planning. No torch."""

HEAD_CHUNK_BYTES = 32 * 2**20  # fp32 logits in memory at a time; at 8k tokens 1k columns
HEAD_CHUNKS = 4  # chunks whose gradients, in the weight's dtype, go into one product
