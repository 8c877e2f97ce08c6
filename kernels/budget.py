"""Temporary memory of kernels, for memory planning. No torch."""

HEAD_CHUNK_BYTES = 32 * 2**20  # fp32 logits in memory at a time; at 8k tokens 1k columns
HEAD_CHUNKS = 4  # chunks whose gradients, in the weight's dtype, go into one product
CHUNK = 64  # tokens of a chunk of a recurrence, at most


def chunk_width(longest: int) -> int:
    """Return the tokens of a chunk of a recurrence, if the longest sequence has so many: it has no padding, or
    little."""
    return -(-longest // -(-longest // CHUNK))
