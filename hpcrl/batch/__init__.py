"""Columns of a step and how samples are shared out."""
