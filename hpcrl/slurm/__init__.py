"""Batch jobs: `hpcrl submit`, site files, bundles, chains, and `hpcrl status`. Login nodes only; no rank imports it."""
