"""Rules, by the kind of answer."""
