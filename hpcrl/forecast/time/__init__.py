"""Seconds of each phase of a step on a machine, their calibration, and the search for the fastest layout. No torch."""
