"""The actor's weights in the layout of the rollout engine: a plan from two layouts, and its execution between ranks. No
engine's internals: an engine names the shards that it needs."""
