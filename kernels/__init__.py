"""GPU kernels in Triton, packaged as `hpcrl.kernels`.

`name.py` holds functions, their plain-torch references, which the CPU runs, and the choice between those and the
kernels in `name_triton.py`, which nothing else imports: Triton is not available everywhere.

The constants here are of kernels' temporary memory, for memory planning without torch.
"""

HEAD_CHUNK_BYTES = 32 * 2**20  # fp32 logits in memory at a time; at 8k tokens 1k columns
HEAD_CHUNKS = 4  # chunks whose gradients, in the weight's dtype, go into one product
# Tokens of a chunk of a recurrence, at most. Half as many are faster for the gated delta rule, whose chunks are
# inverted: by 4% to 25% on a CPU for heads of 32 and 64, and by -10% to 10% for heads of 128.
CHUNK, DELTA_CHUNK = 64, 32


def chunk_width(longest: int, most: int) -> int:
    """Return the tokens of a chunk of a recurrence, if the longest sequence has so many: it has no padding, or
    little."""
    return -(-longest // -(-longest // most))
