"""The job template: its keys and defaults, the loader of YAML and overrides, what follows from them, and which go
together. No torch and no MPI; what a rule needs to know of a model or an engine is asked there."""
