"""How long a step takes, and which layout is fastest, before a job runs. No torch."""
