"""The job template: its keys and defaults, the loader of YAML and overrides, what follows from them, and which go
together. No torch, no MPI, and nothing of the inside of a model or an engine."""
