"""Rank grids of roles: layout arithmetic, and process groups."""
