"""Models: shape, parameters and their shards, megatron modules, and the formulas that the native engine shares with
them. No optimizer, no batch of samples, no rank beyond a layout."""
