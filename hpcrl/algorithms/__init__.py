"""Estimators, losses and statistics: torch and numpy alone, no ranks."""
