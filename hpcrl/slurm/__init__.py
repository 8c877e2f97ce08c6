"""Batch jobs: `hpcrl submit`, site files (partition, modules, environment variables), bundles, chains, and `hpcrl
status`. Login nodes only; no rank imports it."""
