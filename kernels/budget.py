"""Memory that kernels take beside inputs and results, for those who plan it: no torch here."""

HEAD_CHUNK_BYTES = 32 * 2**20  # of fp32 logits that the head has at once; at 8k tokens 1k columns
HEAD_CHUNKS = 4  # of which the gradients, in the weight's dtype, go into one product
