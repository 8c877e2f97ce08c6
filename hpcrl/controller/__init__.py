"""Rank 0 as the controller: it sends commands; the columns move between the ranks that have and need them."""
