"""Rank 0 as the dataflow controller: it sends plans, the tensors go from owner to owner."""
