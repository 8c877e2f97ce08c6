"""Rules: one file for each kind of answer, and what they share."""
