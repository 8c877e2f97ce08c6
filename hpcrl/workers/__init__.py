"""The worker class of each role: what its ranks do when rank 0 calls. Formulas are in `hpcrl.algorithms`, models in
`hpcrl.engine`."""
