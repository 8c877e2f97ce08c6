"""Prompt and answer datasets, tokenizer, stateless order."""
