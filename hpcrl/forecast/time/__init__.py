"""Seconds of each phase of a step on a machine, calibration by the recorded steps of runs, and the search for the
fastest layout. No torch."""
