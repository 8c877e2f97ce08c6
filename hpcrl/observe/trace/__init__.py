"""What every rank did and when: records of each step, clocks, and `hpcrl trace` for Perfetto. What is timed is said
where it happens, by `hpcrl.runtime.spans`."""
